"""Lengths, tables and ids are data: a change in them never compiles anything again."""

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv

CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=32, block_size=4, max_seqs=6,
    max_blocks_per_seq=8, dtype="float32",
)  # fmt: skip


class Counted:
    """A jitted function that counts how often it was traced and how many programs it has."""

    def __init__(self, function):
        self.traces = 0

        def traced(*args):
            self.traces += 1
            return function(*args)

        self.jitted = jax.jit(traced)

    def __call__(self, *args):
        return self.jitted(*args)

    def assert_compiled_once(self):
        assert self.traces == 1
        assert self.jitted._cache_size() == 1


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def test_a_batch_that_grows_decodes_with_one_program():
    def step(state, pool, seq_ids, q):
        state, result = pkv.append(state, seq_ids, 1)
        plan = pkv.make_plan(state, seq_ids, 1, result)
        pool = pkv.write(pool, 0, q, q, plan)
        return state, pool, pkv.paged_attention(q, pool, 0, plan)

    counted = Counted(step)
    state, pool = pkv.init(CONFIG), pkv.init_pool(CONFIG)
    rows = np.full(4, -1, np.int32)
    q = jnp.ones((4, 1, 8))
    for joined in range(4):
        rows[joined] = 5 - joined
        state, _ = pkv.allocate(state, ids(5 - joined), 3 * joined + 1)
        for _ in range(5):  # past the end of a block
            state, pool, _ = counted(state, pool, jnp.asarray(rows), q)
    state, _ = pkv.free(state, ids(4))
    state, pool, _ = counted(state, pool, jnp.asarray(rows), q)
    assert state.seq_lens.tolist() == [0, 0, 16, 18, 0, 22]
    counted.assert_compiled_once()


def test_chunks_of_any_lengths_prefill_with_one_program():
    def prefill(state, pool, seq_ids, counts, q):
        state, result = pkv.allocate(state, seq_ids, counts, max_new_tokens=8)
        plan = pkv.make_plan(state, seq_ids, counts, result, num_tokens=12, max_query_len=8)
        pool = pkv.write(pool, 0, q, q, plan)
        return state, pool, pkv.paged_attention(q, pool, 0, plan)

    counted = Counted(prefill)
    state, pool = pkv.init(CONFIG), pkv.init_pool(CONFIG)
    q = jnp.ones((12, 1, 8))
    for seq_ids, counts in ((ids(0, 1, -1), ids(8, 3, 0)), (ids(3, -1, 1), ids(1, 0, 7))):
        state, pool, _ = counted(state, pool, seq_ids, counts, q)
    assert state.seq_lens.tolist() == [8, 10, 0, 1, 0, 0]
    counted.assert_compiled_once()


def test_freeing_copying_and_querying_take_any_ids_with_one_program():
    def others(state, pool, seq_ids):
        pool = pkv.copy_blocks(pool, seq_ids, seq_ids + 8)
        pool = pkv.write_prefill(
            pool, seq_ids[0] % 1, jnp.ones((9, 1, 8)), jnp.ones((9, 1, 8)), seq_ids[1], seq_ids
        )
        state, result = pkv.free(state, seq_ids)
        counts = pkv.block_count(state, seq_ids), pkv.block_offset(state, seq_ids, seq_ids)
        return state, pool, result, counts, pkv.stats(state)

    counted = Counted(others)
    state, pool = pkv.init(CONFIG), pkv.init_pool(CONFIG)
    for seq_ids in (ids(0, 1), ids(5, -1), ids(-1, 99)):
        state, pool, *_ = counted(state, pool, seq_ids)
    counted.assert_compiled_once()


def test_plans_from_tables_of_any_content_share_one_program():
    def plan(block_table, kv_lens, q_lens):
        return pkv.plan_from_tables(block_table, kv_lens, q_lens, block_size=4, num_tokens=8)

    counted = Counted(plan)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        table, kv_lens, q_lens = (
            jnp.asarray(rng.integers(0, 9, shape), jnp.int32) for shape in ((3, 4), 3, 3)
        )
        counted(table, kv_lens, q_lens)
    counted.assert_compiled_once()


def test_plans_of_one_kind_have_one_structure_whatever_they_hold():
    """So that a plan may pass a jit boundary or a loop's carry."""
    state, result = pkv.allocate(pkv.init(CONFIG), ids(0, 1), ids(3, 9))
    plans = [
        pkv.make_plan(state, seq_ids, ids(2, 1), result, num_tokens=4)
        for seq_ids in (ids(0, 1), ids(-1, 1))
    ]
    assert len({jax.tree.structure(plan) for plan in plans}) == 1
