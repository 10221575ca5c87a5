"""fork, truncate and release_before: one test for each named behaviour."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_pool import TokenWorld, config, ids

import paged_kv_jax as pkv

fork, truncate, free = jax.jit(pkv.fork), jax.jit(pkv.truncate), jax.jit(pkv.free)
append, release_before = jax.jit(pkv.append), jax.jit(pkv.release_before)


def table(state, seq_id: int) -> list[int]:
    row = np.asarray(state.block_table)[seq_id]
    return row[: int(state.seq_block_count[seq_id])].tolist()


def assert_untouched(state, before) -> None:
    """Nothing but the sticky word differs."""
    for field in dataclasses.fields(state):
        if field.name not in ("errors", "block_size"):
            np.testing.assert_array_equal(getattr(state, field.name), getattr(before, field.name))


def test_fork_shares_full_blocks_and_copies_the_partial_tail():
    world = TokenWorld()
    tokens = world.extend(s0=10)["s0"]
    world.state, result, copies = fork(world.state, ids(0), ids(3))
    world.copy(copies)
    assert result.tolist() == [1]
    assert table(world.state, 3)[:2] == table(world.state, 0)[:2]
    assert table(world.state, 3)[2] != table(world.state, 0)[2]
    assert copies.src.tolist() == [table(world.state, 0)[2]]
    assert copies.dst.tolist() == [table(world.state, 3)[2]]
    assert world.read(3) == world.read(0) == tokens
    assert int(world.state.free_top) == 16 - 4
    world.check()


def test_fork_of_whole_blocks_takes_no_block_and_copies_nothing():
    world = TokenWorld()
    world.extend(s0=8)
    world.state, result, copies = fork(world.state, ids(0, 0), ids(1, 2))
    assert result.tolist() == [0, 0]
    assert copies.src.tolist() == copies.dst.tolist() == [-1, -1]
    assert int(world.state.free_top) == 14
    assert world.state.ref_count[jnp.asarray(table(world.state, 0))].tolist() == [3, 3]
    world.check()


@pytest.mark.parametrize("length", range(1, 11))
def test_fork_of_a_prefix_starts_with_that_many_tokens(length: int):
    world = TokenWorld()
    tokens = world.extend(s0=10)["s0"]
    world.state, result, copies = fork(world.state, ids(0), ids(1), ids(length))
    world.copy(copies)
    assert result.tolist() == [int(length % 4 > 0)]
    assert world.read(1) == tokens[:length]
    assert world.read(0) == tokens
    world.check()


def test_siblings_that_diverge_at_once_never_write_into_each_others_blocks():
    """Forks, and forks of forks, with every sequence growing through several blocks at the same time."""
    world = TokenWorld(config(num_blocks=32))
    history = {0: world.extend(s0=7)["s0"]}
    for parents, children in (((0, 0), (1, 2)), ((1, 2, 2), (3, 4, 5))):
        world.state, result, copies = fork(world.state, ids(*parents), ids(*children))
        assert result.tolist() == [1] * len(parents)
        world.copy(copies)
        for parent, child in zip(parents, children, strict=True):
            history[child] = list(history[parent])
        given = world.extend(**{f"s{seq}": 6 for seq in history})
        for seq in history:
            history[seq] += given[f"s{seq}"]
            assert world.read(seq) == history[seq]
        world.check()
    world.state, _ = free(world.state, ids(0, 1, 2, -1, -1, -1))
    for seq in (3, 4, 5):
        assert world.read(seq) == history[seq]
    world.state, _ = free(world.state, ids(3, 4, 5, -1, -1, -1))
    assert int(world.state.free_top) == 32
    world.check()


def test_a_block_goes_back_only_with_its_last_sequence():
    world = TokenWorld()
    world.extend(s0=8)
    world.state, _, _ = fork(world.state, ids(0, 0), ids(1, 2))
    freed = []
    for seq in (0, 2, 1):
        world.state, result = free(world.state, ids(seq))
        freed += result.tolist()
    assert freed == [0, 0, 2]
    world.check()


def test_fork_failures_are_reported_and_touch_nothing():
    world = TokenWorld()
    world.extend(s0=5, s1=5)
    before = world.state
    cases = [
        ((4,), (3,), None, -2),  # the parent is not live
        ((-1,), (3,), None, -2),
        ((6,), (3,), None, -2),
        ((0,), (1,), None, -2),  # the child is live
        ((0,), (0,), None, -2),
        ((0,), (-1,), None, -2),
        ((0,), (6,), None, -2),
        ((0,), (3,), (0,), -5),
        ((0,), (3,), (6,), -5),
        ((0,), (3,), (-(2**31),), -5),
    ]
    for parents, children, lengths, code in cases:
        lengths = None if lengths is None else ids(*lengths)
        state, result, copies = fork(before, ids(*parents), ids(*children), lengths)
        assert result.tolist() == [code], (parents, children, lengths)
        assert copies.dst.tolist() == [-1]
        assert_untouched(state, before)
        with pytest.raises(pkv.PagedKVError, match=pkv.ResultCode(code).name):
            pkv.raise_if_failed(state)
    state, result, _ = fork(before, ids(-1, 0, 1), ids(-1, 3, 3))
    assert result.tolist() == [0, 1, -4]
    assert_untouched(state, fork(before, ids(0), ids(3))[0])


def test_fork_serves_rows_in_order_and_lets_no_later_row_past_one_that_found_no_block():
    world = TokenWorld(config(num_blocks=4))
    world.extend(s0=5, s1=4)
    state, result, copies = fork(world.state, ids(0, 0, 1, 0), ids(2, 3, 4, 5))
    assert result.tolist() == [1, -1, 0, -1]
    assert (np.asarray(copies.dst) >= 0).tolist() == [True, False, False, False]
    assert state.seq_lens.tolist() == [5, 4, 5, 0, 4, 0]
    assert pkv.check_invariants(state) == []


def test_truncate_gives_back_the_blocks_past_the_new_length():
    world = TokenWorld()
    tokens = world.extend(s0=15)["s0"]
    for new_len, back in ((15, 0), (13, 0), (12, 1), (5, 1), (4, 1), (1, 0)):
        world.state, result, copies = truncate(world.state, ids(0), ids(new_len))
        assert result.tolist() == [back]
        assert copies.dst.tolist() == [-1]
        assert world.read(0) == tokens[:new_len]
        world.check()
    world.state, result, _ = truncate(world.state, ids(0), ids(0))
    assert result.tolist() == [1]
    assert int(world.state.free_top) == 16
    world.state, result = append(world.state, ids(0), ids(1))
    assert result.tolist() == [-2]  # ended, as by free


def test_a_speculative_step_that_is_rolled_back_leaves_the_sequence_as_if_it_never_was():
    world = TokenWorld()
    tokens = world.extend(s0=6, s1=3)
    before = world.state
    world.extend(s0=5, s1=5)
    world.state, result, copies = truncate(world.state, ids(0, 1), ids(7, 3))
    world.copy(copies)
    assert result.tolist() == [1, 1]
    assert world.read(0)[:6] == tokens["s0"]
    assert world.read(1) == tokens["s1"]
    assert table(world.state, 1) == table(before, 1)
    world.check()


def test_truncating_into_a_shared_block_copies_it_before_anyone_appends():
    world = TokenWorld()
    tokens = world.extend(s0=8)["s0"]
    world.state, _, copies = fork(world.state, ids(0), ids(1))
    world.copy(copies)
    world.state, result, copies = truncate(world.state, ids(1), ids(6))
    assert result.tolist() == [0]
    assert copies.src.tolist() == [table(world.state, 0)[1]]
    world.copy(copies)
    new = world.extend(s1=2)["s1"]
    assert world.read(0) == tokens
    assert world.read(1) == tokens[:6] + new
    world.check()


def test_rows_that_truncate_into_the_same_block_at_once_each_get_their_own():
    world = TokenWorld()
    tokens = world.extend(s0=8)["s0"]
    world.state, _, copies = fork(world.state, ids(0), ids(1))
    world.copy(copies)
    world.state, result, copies = truncate(world.state, ids(0, 1), ids(6, 5))
    world.copy(copies)
    assert sum(result.tolist()) == 1  # the block that nobody refers to any more
    new = world.extend(s0=3, s1=3)
    assert world.read(0) == tokens[:6] + new["s0"]
    assert world.read(1) == tokens[:5] + new["s1"]
    world.check()


def test_truncate_without_a_block_for_the_copy_leaves_the_sequence_alone():
    world = TokenWorld(config(num_blocks=2))
    world.extend(s0=8)
    world.state, _, _ = fork(world.state, ids(0), ids(1))
    state, result, copies = truncate(world.state, ids(1), ids(6))
    assert result.tolist() == [-1]
    assert copies.dst.tolist() == [-1]
    assert_untouched(state, world.state)


def test_truncate_failures_are_reported_and_touch_nothing():
    world = TokenWorld()
    world.extend(s0=5)
    bad = ((0, 6, -5), (0, -1, -5), (0, 2**31 - 1, -5), (1, 0, -2), (-2, 1, -2), (6, 1, -2))
    for seq, new_len, code in bad:
        state, result, _ = truncate(world.state, ids(seq), ids(new_len))
        assert result.tolist() == [code]
        assert_untouched(state, world.state)
    state, result, _ = truncate(world.state, ids(-1, 0, 0), ids(9, 4, 1))
    assert result.tolist() == [0, 1, -4]
    assert state.seq_lens.tolist()[0] == 4


def test_release_before_gives_back_what_lies_wholly_behind_and_keeps_the_length():
    world = TokenWorld()
    tokens = world.extend(s0=14)["s0"]
    for position, back in ((-5, 0), (3, 0), (4, 1), (11, 1), (11, 0), (14, 1)):
        world.state, result = release_before(world.state, ids(0), ids(position))
        assert result.tolist() == [back]
        behind = max(position, 0) // 4 * 4
        assert world.read(0) == [None] * behind + tokens[behind:]
        world.check()
    assert table(world.state, 0)[:3] == [-1, -1, -1]
    new = world.extend(s0=9)["s0"]
    assert world.read(0)[12:] == tokens[12:] + new
    world.state, result = free(world.state, ids(0))
    assert result.tolist() == [3]
    assert int(world.state.free_top) == 16
    world.check()


def test_release_before_of_everything_keeps_the_sequence_live():
    world = TokenWorld()
    world.extend(s0=8)
    world.state, result = release_before(world.state, ids(0), ids(8))
    assert result.tolist() == [2]
    new = world.extend(s0=1)["s0"]
    assert world.read(0) == [None] * 8 + new
    world.check()


def test_release_before_failures_are_reported_and_touch_nothing():
    world = TokenWorld()
    world.extend(s0=5)
    for seq, position, code in ((0, 6, -5), (1, 0, -2), (9, 0, -2)):
        state, result = release_before(world.state, ids(seq), ids(position))
        assert result.tolist() == [code]
        assert_untouched(state, world.state)
    state, result = release_before(world.state, ids(-1, 0, 0), ids(99, 4, 4))
    assert result.tolist() == [0, 1, -4]


def test_nothing_reaches_back_into_released_blocks():
    world = TokenWorld()
    tokens = world.extend(s0=14)["s0"]
    world.state, _ = release_before(world.state, ids(0), ids(9))
    for length in (1, 4, 7):
        assert fork(world.state, ids(0), ids(1), ids(length))[1].tolist() == [-5]
        assert truncate(world.state, ids(0), ids(length))[1].tolist() == [-5]
    world.state, result, copies = fork(world.state, ids(0), ids(1), ids(10))
    world.copy(copies)
    assert result.tolist() == [1]
    assert world.read(1) == [None] * 8 + tokens[8:10]
    world.state, result, _ = truncate(world.state, ids(0), ids(8))
    assert result.tolist() == [2]
    world.check()
    world.state, result, _ = truncate(world.state, ids(0), ids(0))  # as free: nothing left to give
    assert result.tolist() == [0]
    world.check()


def test_a_block_behind_the_window_of_one_fork_stays_for_the_other():
    world = TokenWorld()
    tokens = world.extend(s0=8)["s0"]
    world.state, _, _ = fork(world.state, ids(0), ids(1))
    world.state, result = release_before(world.state, ids(0), ids(8))
    assert result.tolist() == [0]
    assert world.read(1) == tokens
    world.state, result = release_before(world.state, ids(1), ids(8))
    assert result.tolist() == [2]
    world.check()


def test_windowed_attention_is_the_same_bits_once_the_blocks_behind_the_window_are_gone():
    window, rng = 6, np.random.default_rng(0)
    geometry = pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=16, block_size=4, max_seqs=2,
        max_blocks_per_seq=8, dtype="float32",
    )  # fmt: skip
    values = jnp.asarray(rng.standard_normal((24, 2, 2, 8), np.float32))  # [step, row, K, D]

    @jax.jit
    def run(values, gives_back):
        def step(carry, kv):
            state, pool = carry
            state, result = pkv.append(state, ids(0, 1), 1)
            plan = pkv.make_plan(state, ids(0, 1), 1, result)
            pool = pkv.write(pool, 0, kv, kv, plan)
            out = pkv.paged_attention(kv, pool, 0, plan, sliding_window=window)
            # The next query sits at position seq_len and sees the window - 1 keys before it.
            behind = jnp.where(gives_back, state.seq_lens - window + 1, 0)
            state, _ = pkv.release_before(state, ids(0, 1), behind)
            # Whatever a free block comes to hold is never seen.
            free = jnp.where((state.ref_count == 0) & gives_back, jnp.nan, 0)
            pool = pkv.KVPool(*(side + free[:, None, None, None] for side in (pool.k, pool.v)))
            return (state, pool), (out, state.free_top)

        state, _ = pkv.allocate(pkv.init(geometry), ids(0, 1), jnp.array([1, 3]))
        carry, (out, free_top) = jax.lax.scan(step, (state, pkv.init_pool(geometry)), values)
        return carry[0], out, free_top

    kept, expected, _ = run(values, False)
    state, out, free_top = run(values, True)
    np.testing.assert_array_equal(out, expected)
    assert np.min(np.asarray(free_top)) >= 16 - 2 * 3  # a window of 6 lies in at most 3 blocks of 4
    assert int(kept.free_top) == 16 - 14
    assert pkv.check_invariants(state) == []
    pkv.raise_if_failed(state)


def test_stats_count_the_slots_of_shared_blocks_once():
    world = TokenWorld()
    world.extend(s0=6)
    world.state, _, _ = fork(world.state, ids(0, 0), ids(1, 2))
    numbers = pkv.stats(world.state)
    assert int(numbers.used_blocks) == 4
    assert int(numbers.wasted_slots) == 6
    assert float(numbers.utilisation) == pytest.approx(10 / 16)
    world.state, _ = release_before(world.state, ids(0, 1, 2), ids(4, 4, 4))
    assert int(pkv.stats(world.state).used_blocks) == 3
    assert float(pkv.stats(world.state).utilisation) == pytest.approx(0.5)


def test_check_invariants_sees_a_writable_tail_that_is_shared():
    world = TokenWorld()
    world.extend(s0=6)
    shared = world.state.block_table.at[1].set(world.state.block_table[0])
    state = dataclasses.replace(
        world.state,
        block_table=shared,
        seq_lens=world.state.seq_lens.at[1].set(6),
        seq_block_count=world.state.seq_block_count.at[1].set(2),
        ref_count=world.state.ref_count * 2,
    )
    assert pkv.check_invariants(state) == [
        "a partly filled tail block is missing, or has more than one reference"
    ]


def test_shapes_that_do_not_agree_raise_and_name_the_argument():
    state = pkv.init(config())
    with pytest.raises(ValueError, match="child_ids has shape"):
        pkv.fork(state, ids(0, 1), ids(2))
    with pytest.raises(ValueError, match="lengths has shape"):
        pkv.fork(state, ids(0), ids(2), ids(1, 2))
    with pytest.raises(ValueError, match="new_lens has shape"):
        pkv.truncate(state, ids(0), ids(2, 3))
    with pytest.raises(TypeError, match="positions has dtype"):
        pkv.release_before(state, ids(0), jnp.array([1.5]))


def test_sharing_costs_nothing_that_grows_with_the_pool():
    """In a compiled loop over 100,000 blocks nothing of that size is made, beyond the state itself."""
    num_blocks, rows = 100_000, jnp.arange(3, dtype=jnp.int32)

    def step(state, _):
        state, _ = pkv.allocate(state, rows, jnp.array([5, 9, 4]))
        state, _, forked = pkv.fork(state, rows, rows + 3)
        state, _, truncated = pkv.truncate(state, rows, jnp.array([4, 5, 1]))
        state, _ = pkv.release_before(state, rows + 3, jnp.array([0, 5, 4]))
        state, _ = pkv.free(state, jnp.arange(6))
        return state, (forked, truncated)

    loop = jax.jit(lambda state: jax.lax.scan(step, state, length=9), donate_argnums=0)
    state = jax.eval_shape(lambda: pkv.init(config(num_blocks=num_blocks)))
    compiled = loop.lower(state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < num_blocks
