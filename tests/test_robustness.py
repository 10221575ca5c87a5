"""The kinds of fault that paged KV caches are reported for, one small test each, per implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import paged_kv_jax as pkv

each_implementation = pytest.mark.parametrize("implementation", ["xla", "reference"])
each_poison = pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 65504.0, 0.5])


def case_with(seed: int = 0, **changes) -> oracle.Case:
    """Decode rows, a chunk, whole prefills, a row that takes no part, spare places at the end."""
    arguments = dict(
        q_lens=[1, 5, 1, 13, 1], kv_lens=[1, 37, 0, 13, 70], num_tokens=23, head_dim=32, block_size=8,
    )  # fmt: skip
    return oracle.make_case(np.random.default_rng(seed), **{**arguments, **changes})


def assert_same_bytes(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


# Index width.


def test_offsets_of_pools_beyond_2_31_elements_are_not_formed_as_one_int32():
    """Such a pool does not fit a small machine, so the programs for one are traced and searched.

    An index into the pool keeps its block apart from its layer and its offset; no array of the traced
    programs flattens the pool. (The values at the top of such pools are tested on the GPU.)
    """
    config = pkv.KVCacheConfig(
        num_layers=2, num_kv_heads=8, head_dim=256, num_blocks=70_000, block_size=16, max_seqs=2,
        max_blocks_per_seq=8,
    )  # fmt: skip
    pool = jax.eval_shape(lambda: pkv.init_pool(config))
    assert pool.k.size > 2**31
    table = jnp.full((2, 8), 69_999, jnp.int32)

    def step(pool, k, q):
        plan = pkv.plan_from_tables(table, jnp.array([5, 9], jnp.int32), 1, block_size=16)
        pool = pkv.write(pool, 1, k, k, plan)
        pool = pkv.copy_blocks(pool, table[0, :1], table[1, :1])
        return pkv.paged_attention(q, pool, 1, plan, implementation="xla")

    k = jax.ShapeDtypeStruct((2, 8, 256), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((2, 16, 256), jnp.bfloat16)
    text = str(jax.make_jaxpr(step)(pool, k, q))
    assert f"bf16[2,{70_000},16,8,256]" in text
    for flattened in (2 * 70_000, 70_000 * 16, 2 * 70_000 * 16, pool.k.size):
        assert f"[{flattened}," not in text
        assert f"[{flattened}]" not in text


def test_slots_and_block_offsets_at_the_top_of_the_largest_pool_are_right():
    last = (2**31 - 1) // 16 - 1
    plan = pkv.plan_from_tables(
        jnp.array([[last]], jnp.int32), jnp.array([16], jnp.int32), 1, block_size=16
    )
    assert plan.slot_mapping.tolist() == [last * 16 + 15]
    pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=last + 1, max_seqs=1,
        max_blocks_per_seq=1,
    )  # fmt: skip


# Unused slots.


@each_implementation
@each_poison
def test_what_unused_slots_hold_changes_no_bit(implementation: str, poison: float):
    case = case_with(seed=1, dtype="float16")
    clean = oracle.run(case.with_unseen(0.0), implementation)
    assert np.all(np.isfinite(clean[0]))
    assert_same_bytes(oracle.run(case.with_unseen(poison), implementation), clean)


@each_implementation
@each_poison
def test_what_lies_behind_the_window_changes_no_bit(implementation: str, poison: float):
    case = case_with(seed=2, q_lens=[1, 1, 3], kv_lens=[37, 70, 9], num_tokens=5)
    options = dict(sliding_window=6, sinks=np.zeros(4, np.float32))
    clean = oracle.run(case.with_unseen(0.0, sliding_window=6), implementation, **options)
    dirty = oracle.run(case.with_unseen(poison, sliding_window=6), implementation, **options)
    assert_same_bytes(dirty, clean)


@each_implementation
def test_what_tokens_of_no_row_bring_changes_no_bit(implementation: str):
    case = case_with(seed=3)
    clean = oracle.run(case, implementation)
    case.q[case.cu_q_lens[-1] :] = np.nan  # places without a token
    case.q[case.cu_q_lens[2]] = np.inf  # the row that takes no part
    assert_same_bytes(oracle.run(case, implementation), clean)


@each_implementation
def test_very_negative_logits_are_not_lost(implementation: str):
    case = case_with(seed=4, q_lens=[1, 2], kv_lens=[9, 20], num_tokens=3)
    case.q[...] = 1
    case.k_pool[...] = -1e30 * (1 + np.abs(case.k_pool) / 8)
    out, lse = oracle.run(case, implementation, scale=1e3)
    exact, exact_lse = oracle.attention(case, scale=1e3)
    assert exact_lse.max() < -1e34
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
    np.testing.assert_allclose(out, exact, rtol=1e-6)


# Empty and fully masked rows.


@each_implementation
def test_queries_with_nothing_to_see_yield_zero_and_minus_infinity(implementation: str):
    case = case_with(seed=5, q_lens=[2, 6, 1, 1], kv_lens=[0, 4, 0, 3], num_tokens=12)
    case = case.with_unseen(np.nan)
    out, lse = oracle.run(case, implementation)
    empty = [0, 1, 2, 3, 8, 10, 11]  # kv_len 0, positions before 0, places without a token
    assert not np.any(out[empty])
    assert np.all(lse[empty] == -np.inf)
    exact, exact_lse = oracle.attention(case)
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-5)


@each_implementation
@pytest.mark.parametrize("kv_lens", [[0, 9, 3], [9, 0, 3], [9, 3, 0]])
def test_rows_without_blocks_read_none_wherever_they_stand(implementation: str, kv_lens: list[int]):
    case = case_with(seed=13, q_lens=[1, 1, 1], kv_lens=kv_lens, num_tokens=3, spare_blocks=20)
    assert not np.any(case.block_table == case.k_pool.shape[1] - 1)  # where -1 would wrap to
    out, lse = oracle.run(case.with_unseen(np.nan), implementation)
    exact, exact_lse = oracle.attention(case)
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-5)


@each_implementation
def test_a_batch_in_which_no_row_takes_part_yields_zeros(implementation: str):
    case = case_with(seed=6, q_lens=[1, 1], kv_lens=[0, 0], num_tokens=3)
    out, lse = oracle.run(case.with_unseen(np.nan), implementation)
    assert not np.any(out)
    assert np.all(lse == -np.inf)


@each_implementation
def test_with_nothing_to_see_a_sink_takes_all_the_weight(implementation: str):
    case = case_with(seed=7, q_lens=[2, 1], kv_lens=[1, 5], num_tokens=4)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    out, lse = oracle.run(case, implementation, sinks=sinks)
    assert not np.any(out[[0, 3]])
    np.testing.assert_array_equal(lse[0], sinks)  # a token of a row
    assert np.all(lse[3] == -np.inf)  # no token


def merge(parts):
    """Partial results joined by their log-sum-exps, in float64."""
    outs, lses = (np.stack(arrays).astype(np.float64) for arrays in zip(*parts, strict=True))
    total = np.logaddexp.reduce(lses, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(lses == -np.inf, 0, np.exp(lses - total))
    return (outs * weights[..., None]).sum(0), total


@each_implementation
@pytest.mark.parametrize("cut", [0, 3, 5])
def test_partial_results_merge_into_the_whole_by_their_lse(implementation: str, cut: int):
    """One query over all keys equals itself over the first `cut` blocks and over the others."""
    case = case_with(seed=8, q_lens=[1], kv_lens=[39], num_tokens=1)
    whole, whole_lse = oracle.run(case, implementation)
    first = dataclasses.replace(case, kv_lens=np.array([cut * 8], np.int32).clip(max=39))
    rest = dataclasses.replace(
        case,
        kv_lens=np.array([39 - cut * 8], np.int32).clip(min=0),
        block_table=case.block_table[:, cut:],
    )
    out, lse = merge([oracle.run(first, implementation), oracle.run(rest, implementation)])
    np.testing.assert_allclose(out, whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


@each_implementation
def test_merging_an_empty_partial_changes_nothing(implementation: str):
    case = case_with(seed=9, q_lens=[1], kv_lens=[30], num_tokens=1)
    part = oracle.run(case, implementation)
    empty = oracle.run(dataclasses.replace(case, kv_lens=np.array([0], np.int32)), implementation)
    np.testing.assert_array_equal(merge([part, empty])[0].astype(np.float32), part[0])


# Padding, freed rows, and one compiled program for all of it.

CONFIG = pkv.KVCacheConfig(
    num_layers=2, num_kv_heads=1, head_dim=4, num_blocks=12, block_size=4, max_seqs=4,
    max_blocks_per_seq=6, dtype="float32",
)  # fmt: skip


@jax.jit
def decode(state, pool, seq_ids, k):
    """One token per row, written into both layers."""
    state, result = pkv.append(state, seq_ids, 1)
    plan = pkv.make_plan(state, seq_ids, 1, result)
    for layer in range(2):
        pool = pkv.write(pool, layer, k, k + 1, plan)
    return state, pool, plan, result


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def started(*lens: int):
    """A state with sequences of these lengths, and a pool full of sevens."""
    state, _ = pkv.allocate(pkv.init(CONFIG), jnp.arange(len(lens), dtype=jnp.int32), ids(*lens))
    pool = jax.tree.map(lambda array: jnp.full_like(array, 7), pkv.init_pool(CONFIG))
    return state, pool


def assert_pool_changed_only_at(pool, before, slots: dict[int, float]) -> None:
    k, v = (np.array(array).reshape(2, -1, 4) for array in (before.k, before.v))
    for slot, value in slots.items():
        k[:, slot], v[:, slot] = value, value + 1
    assert np.asarray(pool.k).tobytes() == k.tobytes()
    assert np.asarray(pool.v).tobytes() == v.tobytes()


def tokens(*values: float) -> jax.Array:
    return jnp.broadcast_to(jnp.array(values, jnp.float32)[:, None, None], (len(values), 1, 4))


def test_a_small_batch_after_a_big_one_writes_its_own_slots_and_no_other():
    state, pool = started(3, 6, 2, 5)
    state, pool, _, _ = decode(state, pool, ids(0, 1, 2, 3), tokens(1, 2, 3, 4))
    state, after, _, result = decode(state, pool, ids(2, -1, -1, -1), tokens(5, 6, 7, 8))
    assert result.tolist() == [0, 0, 0, 0]
    block = int(state.block_table[2, 0])
    assert_pool_changed_only_at(after, pool, {block * 4 + 3: 5.0})
    assert decode._cache_size() == 1


def test_a_batch_of_padding_alone_changes_no_byte():
    state, pool = started(3, 6, 2, 5)
    _, after, plan, _ = decode(state, pool, ids(-1, -1, -1, -1), tokens(1, 2, 3, 4))
    assert plan.slot_mapping.tolist() == [-1] * 4
    assert_pool_changed_only_at(after, pool, {})


def test_a_step_that_still_names_freed_sequences_changes_no_byte():
    state, pool = started(3, 6, 2, 5)
    state, _ = pkv.free(state, ids(0, 1, 3))
    state, after, _, result = decode(state, pool, ids(0, 1, 2, 3), tokens(1, 2, 3, 4))
    assert result.tolist() == [-2, -2, 0, -2]
    assert_pool_changed_only_at(after, pool, {int(state.block_table[2, 0]) * 4 + 2: 3.0})


def test_a_sequence_that_got_no_block_overwrites_none_of_its_tokens():
    state, pool = started(24, 16, 8)  # all 12 blocks, all full
    state, after, plan, result = decode(state, pool, ids(1, 2, -1, -1), tokens(1, 2, 3, 4))
    assert result.tolist() == [-1, -1, 0, 0]
    assert plan.slot_mapping.tolist() == [-1] * 4
    assert_pool_changed_only_at(after, pool, {})


def test_recycled_blocks_show_nothing_of_their_last_owner():
    state, pool = started(24, 16, 8)
    pool = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), pool)
    state, _ = pkv.free(state, ids(0, 1))
    state, _ = pkv.allocate(state, ids(3), 1)
    plan = pkv.make_plan(state, ids(3), 1, ids(0))
    pool = pkv.write(pool, 0, tokens(2), tokens(3), plan)
    for implementation in ("xla", "reference"):
        out = jax.jit(pkv.paged_attention, static_argnames="implementation")(
            tokens(1), pool, 0, plan, implementation=implementation
        )
        np.testing.assert_array_equal(out, tokens(3))


# Determinism.


@each_implementation
def test_the_same_inputs_give_the_same_bits(implementation: str):
    case = case_with(seed=10, dtype="bfloat16")
    assert_same_bytes(oracle.run(case, implementation), oracle.run(case, implementation))


def test_the_reference_does_not_let_rows_of_a_batch_touch_each_other():
    case = case_with(seed=11)
    together, _ = oracle.run(case, "reference")
    for row in range(5):
        begin, end = case.cu_q_lens[row : row + 2]
        alone = dataclasses.replace(
            case,
            q=case.q[begin:end],
            block_table=case.block_table[row : row + 1],
            kv_lens=case.kv_lens[row : row + 1],
            cu_q_lens=np.array([0, end - begin], np.int32),
        )
        np.testing.assert_allclose(
            oracle.run(alone, "reference")[0], together[begin:end], rtol=1e-6, atol=1e-6
        )


# Wide integers.


@each_implementation
def test_a_step_with_64_bit_types_enabled_gives_the_same_numbers(implementation: str):
    case = case_with(seed=12, head_dim=16)
    narrow = oracle.run(case, implementation)
    with jax.enable_x64(True):
        wide = oracle.run(case, implementation)
        state, result = pkv.allocate(pkv.init(CONFIG), jnp.array([0, 1]), jnp.array([5, 9]))
        plan = pkv.make_plan(state, jnp.array([0, 1]), jnp.array([5, 9]), result, num_tokens=16)
    assert result.tolist() == [2, 3]
    assert {leaf.dtype for leaf in jax.tree.leaves((state, plan))} == {jnp.dtype("int32")}
    np.testing.assert_allclose(wide[0], narrow[0], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(wide[1], narrow[1], rtol=3e-6, atol=2e-5)
