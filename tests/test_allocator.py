"""The allocator's named behaviours, one test each; the random ones are in test_allocator_model.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv

CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=8, block_size=4, max_seqs=4,
    max_blocks_per_seq=5,
)  # fmt: skip
FIELDS = (
    "block_table", "seq_lens", "seq_block_count", "free_list", "free_top", "ref_count", "errors",
)  # fmt: skip


# An int count is static in a jitted call, as it is within a user's jitted step.
def jitted(operation):
    with_int = jax.jit(operation, static_argnums=2, static_argnames="max_new_tokens")
    with_array = jax.jit(operation, static_argnames="max_new_tokens")

    def call(state, seq_ids, count, **options):
        return (with_int if isinstance(count, int) else with_array)(
            state, seq_ids, count, **options
        )

    return call


allocate, append, free = jitted(pkv.allocate), jitted(pkv.append), jax.jit(pkv.free)


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def started(*lens: int, config: pkv.KVCacheConfig = CONFIG) -> pkv.BlockState:
    """A state in which sequence i has `lens[i]` tokens."""
    state, result = allocate(pkv.init(config), jnp.arange(len(lens), dtype=jnp.int32), ids(*lens))
    assert np.all(np.asarray(result) >= 0)
    return state


def blocks_of(state: pkv.BlockState, seq_id: int) -> list[int]:
    row = np.asarray(state.block_table)[seq_id]
    return row[row >= 0].tolist()


def assert_same(state: pkv.BlockState, other: pkv.BlockState, but: tuple[str, ...] = ()) -> None:
    """Every byte of the two states is the same, but for the fields named."""
    for name in FIELDS:
        if name not in but:
            np.testing.assert_array_equal(getattr(state, name), getattr(other, name), err_msg=name)


def test_init_frees_every_block_and_owns_nothing():
    state = pkv.init(CONFIG)
    assert int(state.free_top) == 8
    assert sorted(np.asarray(state.free_list).tolist()) == list(range(8))
    assert np.all(np.asarray(state.block_table) == -1)
    assert not np.any(np.asarray(state.seq_lens))
    assert int(state.errors) == 0
    assert pkv.check_invariants(state) == []
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("int32")}


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (20, 5)])
def test_allocate_takes_as_many_blocks_as_the_tokens_need(tokens: int, blocks: int):
    state, result = allocate(pkv.init(CONFIG), ids(2), tokens)
    assert result.tolist() == [blocks]
    assert len(set(blocks_of(state, 2))) == blocks
    assert int(state.seq_lens[2]) == tokens
    assert int(state.free_top) == 8 - blocks


def test_allocating_no_tokens_starts_nothing():
    state, result = allocate(pkv.init(CONFIG), ids(1), 0)
    assert result.tolist() == [0]
    assert_same(state, pkv.init(CONFIG))


def test_allocate_on_a_live_sequence_fills_its_tail_block_first():
    state = started(3)
    before = blocks_of(state, 0)
    state, result = allocate(state, ids(0), 1)
    assert result.tolist() == [0]
    assert blocks_of(state, 0) == before
    state, result = allocate(state, ids(0), 6)
    assert result.tolist() == [2]  # 10 tokens in 3 blocks, not 1 + ceil(6 / 4)
    assert blocks_of(state, 0)[:1] == before
    assert int(state.seq_lens[0]) == 10


def test_append_takes_a_block_only_when_the_tail_is_full():
    state = started(2)
    taken = []
    for _ in range(8):
        state, result = append(state, ids(0), 1)
        taken += result.tolist()
    assert taken == [0, 0, 1, 0, 0, 0, 1, 0]


def test_append_spans_several_blocks_at_once():
    state, result = append(started(3, 1), ids(1, 0), ids(12, 6))
    assert result.tolist() == [3, 2]
    assert state.seq_lens.tolist() == [9, 13, 0, 0]
    assert not set(blocks_of(state, 0)) & set(blocks_of(state, 1))


def test_append_to_a_sequence_that_is_not_live_fails():
    state = started(2)
    after, result = append(state, ids(1, 0), 1)
    assert result.tolist() == [-2, 0]
    assert after.seq_lens.tolist() == [3, 0, 0, 0]
    with pytest.raises(pkv.PagedKVError, match="INVALID_SEQ"):
        pkv.raise_if_failed(after)


def test_a_compiled_step_that_names_a_freed_sequence_touches_nothing():
    step = jax.jit(functools.partial(pkv.append, num_new_tokens=1))
    state, _ = step(started(4, 4), ids(0, 1))
    freed, _ = free(state, ids(0, 1))
    after, result = step(freed, ids(0, 1))
    assert result.tolist() == [-2, -2]
    assert_same(after, freed, but=("errors",))


def test_padding_rows_do_nothing_and_yield_zero():
    state = started(3)
    for operation in (allocate, append):
        after, result = operation(state, ids(-1, -1), ids(7, -9))
        assert result.tolist() == [0, 0]
        assert_same(after, state)
    after, result = free(state, ids(-1, -1))
    assert result.tolist() == [0, 0]
    assert_same(after, state)


@pytest.mark.parametrize("seq_id", [-2, 4, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_are_reported_and_touch_nothing(seq_id: int):
    state = started(3)
    for operation in (allocate, append):
        after, result = operation(state, ids(seq_id), 1)
        assert result.tolist() == [-2]
        assert_same(after, state, but=("errors",))
    after, result = free(state, ids(seq_id))
    assert result.tolist() == [-2]
    assert_same(after, state, but=("errors",))


@pytest.mark.parametrize("operation", [allocate, append])
def test_the_first_of_duplicate_rows_wins(operation):
    state, result = operation(started(3, 3), ids(1, 0, 1, 1), ids(1, 2, 3, 4))
    assert result.tolist() == [0, 1, -4, -4]
    assert state.seq_lens.tolist() == [5, 4, 0, 0]
    assert pkv.check_invariants(state) == []


def test_duplicates_of_free_give_the_blocks_back_once():
    state, result = free(started(5, 3), ids(0, 1, 0))
    assert result.tolist() == [2, 1, -4]
    assert int(state.free_top) == 8
    assert pkv.check_invariants(state) == []


def test_freeing_twice_is_a_reported_no_op():
    once, _ = free(started(5, 3), ids(0))
    twice, result = free(once, ids(0))
    assert result.tolist() == [-2]
    assert_same(twice, once, but=("errors",))


@pytest.mark.parametrize("count", [-1, -(2**31)])
def test_negative_counts_are_reported_and_touch_nothing(count: int):
    state = started(3)
    after, result = append(state, ids(0), ids(count))
    assert result.tolist() == [-5]
    assert_same(after, state, but=("errors",))


def test_a_negative_python_count_is_reported_too():
    state = started(3)
    after, result = append(state, ids(0, -1), -1)
    assert result.tolist() == [-5, 0]
    assert_same(after, state, but=("errors",))


@pytest.mark.parametrize("count", [18, 2**30, 2**31 - 1])
def test_passing_max_blocks_per_seq_is_reported_and_touches_nothing(count: int):
    state = started(3)
    after, result = append(state, ids(0), ids(count))
    assert result.tolist() == [-3]
    assert_same(after, state, but=("errors",))
    full, result = append(state, ids(0), ids(17))
    assert result.tolist() == [4]
    assert int(full.seq_lens[0]) == 20


def test_counts_above_max_new_tokens_are_reported_and_touch_nothing():
    state = started(3)
    after, result = append(state, ids(0), ids(6), max_new_tokens=5)
    assert result.tolist() == [-5]
    assert_same(after, state, but=("errors",))


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("count", [1, 4, 5])
def test_max_new_tokens_changes_the_work_and_not_the_outcome(length: int, count: int):
    state = started(length, 4)
    bounded = append(state, ids(0, 1), ids(count, 1), max_new_tokens=5)
    free_of_it = append(state, ids(0, 1), ids(count, 1))
    np.testing.assert_array_equal(bounded[1], free_of_it[1])
    assert_same(bounded[0], free_of_it[0])


@pytest.mark.parametrize("count", [0, 9])
def test_int_counts_and_array_counts_agree(count: int):
    state = started(3, 4, 5)
    rows = ids(2, -1, 0, 7, 0)
    for operation in (allocate, append):
        one = operation(state, rows, count)
        many = operation(state, rows, jnp.full(5, count, jnp.int32))
        np.testing.assert_array_equal(one[1], many[1])
        assert_same(one[0], many[0])


def test_out_of_blocks_leaves_all_as_it_was_but_the_sticky_word():
    state = started(16, 12)  # 7 of 8 blocks
    after, result = append(state, ids(1), 5)  # needs 2
    assert result.tolist() == [-1]
    assert_same(after, state, but=("errors",))
    assert int(after.errors) == pkv.ResultCode.OUT_OF_BLOCKS.bit


def test_rows_before_the_one_that_does_not_fit_are_served():
    state, result = allocate(pkv.init(CONFIG), ids(3, 1, 0), ids(20, 12, 4))
    assert result.tolist() == [5, 3, -1]
    assert state.seq_lens.tolist() == [0, 12, 0, 20]
    assert pkv.check_invariants(state) == []


def test_a_row_that_does_not_fit_is_not_starved_by_smaller_ones_behind_it():
    state, result = allocate(started(20), ids(1, 2, 0), ids(16, 4, 0))
    assert result.tolist() == [-1, -1, 0]  # 4 > 3 free; then nobody who needs a block
    assert state.seq_lens.tolist() == [20, 0, 0, 0]


def test_rows_that_need_no_block_are_served_when_none_is_left():
    state, result = append(started(16, 14), ids(0, 1), 1)
    assert result.tolist() == [-1, 0]
    assert state.seq_lens.tolist() == [16, 15, 0, 0]


def test_failing_rows_do_not_take_blocks_from_those_behind_them():
    rows, counts = ids(9, 0, 0, 1, 2), ids(20, 4, 20, 21, 20)  # -2, fits, -4, -3, fits
    _, result = allocate(pkv.init(CONFIG), rows, counts)
    assert result.tolist() == [-2, 1, -4, -3, 5]


def test_huge_counts_in_many_rows_do_not_wrap_around():
    config = dataclasses.replace(CONFIG, max_seqs=64)
    rows = jnp.arange(64, dtype=jnp.int32)
    state, result = allocate(pkv.init(config), rows, jnp.full(64, 2**31 - 1, jnp.int32))
    assert set(result.tolist()) == {-3}
    assert_same(state, pkv.init(config), but=("errors",))


def test_freed_blocks_are_handed_out_again_and_no_other():
    state = started(16, 16)
    mine = set(blocks_of(state, 1))
    state, result = free(state, ids(1))
    assert result.tolist() == [4]
    state, _ = allocate(state, ids(3), 16)
    assert set(blocks_of(state, 3)) == mine


def test_free_touches_only_the_rows_it_names():
    state = started(5, 6, 7)
    after, result = free(state, ids(1))
    assert result.tolist() == [2]
    for seq_id in (0, 2):
        assert blocks_of(after, seq_id) == blocks_of(state, seq_id)
    assert blocks_of(after, 1) == []
    assert after.seq_lens.tolist() == [5, 0, 7, 0]


def test_the_sticky_word_gathers_and_clear_errors_resets_it():
    state = started(3)
    state, _ = append(state, ids(3), 1)
    state, _ = append(state, ids(0, 0), 1)
    state, _ = append(state, ids(0), 1)  # a success keeps the word
    assert int(state.errors) == (pkv.ResultCode.INVALID_SEQ.bit | pkv.ResultCode.DUPLICATE_SEQ.bit)
    cleared = pkv.clear_errors(state)
    assert int(cleared.errors) == 0
    assert_same(cleared, state, but=("errors",))
    pkv.raise_if_failed(cleared)


@pytest.mark.parametrize("code", list(pkv.ResultCode))
def test_raise_if_failed_names_the_code_its_cause_and_its_remedy(code: pkv.ResultCode):
    state = dataclasses.replace(pkv.init(CONFIG), errors=jnp.int32(code.bit))
    with pytest.raises(pkv.PagedKVError) as failure:
        pkv.raise_if_failed(pkv.init(CONFIG), state)
    assert failure.value.codes == (code,)
    assert f"{code.name} ({int(code)}): {code.remedy}" in str(failure.value)


def test_raise_if_failed_joins_what_several_states_report():
    words = [pkv.ResultCode.OUT_OF_BLOCKS.bit, pkv.ResultCode.PLAN_OVERFLOW.bit, 0]
    states = [dataclasses.replace(pkv.init(CONFIG), errors=jnp.int32(word)) for word in words]
    with pytest.raises(pkv.PagedKVError) as failure:
        pkv.raise_if_failed(*states)
    assert failure.value.codes == (pkv.ResultCode.OUT_OF_BLOCKS, pkv.ResultCode.PLAN_OVERFLOW)


def test_result_codes_have_bits_of_their_own():
    bits = [code.bit for code in pkv.ResultCode]
    assert len({*bits}) == len(bits)
    assert all(bit & (bit - 1) == 0 for bit in bits)


def test_block_count_and_block_offset_follow_the_table():
    state = started(5, 12)
    assert pkv.block_count(state, ids(0, 1, 2, -1, 4)).tolist() == [2, 3, 0, 0, 0]
    first, second = blocks_of(state, 0)
    offsets = pkv.block_offset(state, ids(0, 0, 0, 0, 2, -1, 4), ids(0, 1, 2, -1, 0, 0, 0))
    assert offsets.tolist() == [first * 4, second * 4, -1, -1, -1, -1, -1]
    of_one = pkv.block_offset(state, jnp.int32(1), jnp.arange(5, dtype=jnp.int32))
    assert of_one.tolist() == [block * 4 for block in blocks_of(state, 1)] + [-1, -1]


def test_stats_count_blocks_tokens_and_the_slots_of_tails():
    numbers = pkv.stats(started(5, 12))
    assert (int(numbers.free_blocks), int(numbers.used_blocks)) == (3, 5)
    assert (int(numbers.live_seqs), int(numbers.tokens)) == (2, 17)
    assert int(numbers.wasted_slots) == 3
    assert float(numbers.utilisation) == pytest.approx(17 / 20)
    assert float(pkv.stats(pkv.init(CONFIG)).utilisation) == 1.0


def lifecycle(state: pkv.BlockState) -> tuple[pkv.BlockState, jax.Array]:
    state, first = pkv.allocate(state, ids(0, 1, -1), ids(3, 9, 2))
    state, second = pkv.append(state, ids(1, 2, 0), 2)
    state, third = pkv.free(state, ids(1, 1, 5))
    return state, jnp.stack([first, second, third])


LIFECYCLE_RESULTS = [[1, 3, 0], [0, -2, 1], [3, -4, -2]]


def test_works_the_same_in_jit():
    plain, results = lifecycle(pkv.init(CONFIG))
    jitted, jitted_results = jax.jit(lifecycle)(pkv.init(CONFIG))
    assert results.tolist() == jitted_results.tolist() == LIFECYCLE_RESULTS
    assert_same(plain, jitted)


def test_works_the_same_under_vmap():
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), pkv.init(CONFIG), started(20, 8))
    states, results = jax.jit(jax.vmap(lifecycle))(batch)
    for index, start in enumerate((pkv.init(CONFIG), started(20, 8))):
        alone, result = jax.jit(lifecycle)(start)
        np.testing.assert_array_equal(results[index], result)
        assert_same(jax.tree.map(lambda leaf, i=index: leaf[i], states), alone)


def test_a_failure_in_the_middle_of_a_scan_is_visible_after_it():
    def step(state, _):
        return pkv.append(state, ids(0, 1), 1)

    state, results = jax.lax.scan(step, started(13, 14), None, length=5)
    assert results.T.tolist() == [[0, 0, 0, -1, -1], [0, 0, -1, -1, -1]]
    assert state.seq_lens.tolist() == [16, 16, 0, 0]
    assert int(state.errors) & pkv.ResultCode.OUT_OF_BLOCKS.bit
    with pytest.raises(pkv.PagedKVError, match=r"OUT_OF_BLOCKS \(-1\).*free sequences first"):
        pkv.raise_if_failed(state)


def test_while_loop_runs_until_the_pool_is_full():
    def step(state):
        return pkv.append(state, ids(0, 1), 1)[0]

    state = jax.lax.while_loop(lambda state: state.errors == 0, step, started(1, 1))
    assert state.seq_lens.tolist() == [16, 16, 0, 0]
    assert int(state.free_top) == 0
    assert pkv.check_invariants(state) == []


def shared_between_0_and_1() -> pkv.BlockState:
    """Sequences 0 and 1 share the first two blocks of sequence 0; sequence 2 has its own."""
    state = started(9, 0, 4)
    first, second, _ = blocks_of(state, 0)
    return dataclasses.replace(
        state,
        block_table=state.block_table.at[1, :2].set(ids(first, second)),
        seq_lens=state.seq_lens.at[1].set(8),
        seq_block_count=state.seq_block_count.at[1].set(2),
        ref_count=state.ref_count.at[ids(first, second)].add(1),
    )


def test_a_shared_block_goes_back_with_its_last_reference():
    state = shared_between_0_and_1()
    assert pkv.check_invariants(state) == []
    shared = set(blocks_of(state, 1))
    state, result = free(state, ids(0))
    assert result.tolist() == [1]
    assert pkv.check_invariants(state) == []
    assert set(blocks_of(state, 1)) == shared
    assert int(state.free_top) == 5
    state, result = free(state, ids(1))
    assert result.tolist() == [2]
    assert pkv.check_invariants(state) == []


def test_references_to_one_block_that_go_in_one_call_release_it_once():
    state, result = free(shared_between_0_and_1(), ids(0, 2, 1))
    assert sum(result.tolist()) == 4  # 3 of sequences 0 and 1 together, 1 of sequence 2
    assert int(state.free_top) == 8
    assert not np.any(np.asarray(state.ref_count))
    assert pkv.check_invariants(state) == []


def corrupted(**changes) -> pkv.BlockState:
    """Sequences of 5 and 4 tokens, with some fields changed by hand."""
    state = started(5, 4)
    return dataclasses.replace(
        state, **{name: change(getattr(state, name)) for name, change in changes.items()}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"free_top": lambda top: top + 99}, "free_top=104 is outside"),
        ({"free_top": lambda top: top * 0 - 1}, "free_top=-1 is outside"),
        ({"free_list": lambda free: free.at[0].set(8)}, "free list holds an id that is no block"),
        ({"free_list": lambda free: free.at[0].set(-1)}, "free list holds an id that is no block"),
        ({"free_list": lambda free: free.at[0].set(free[1])}, "on the free list twice"),
        ({"block_table": lambda t: t.at[0, 0].set(8)}, "table holds an id that is no block"),
        ({"block_table": lambda t: t.at[0, 4].set(-2)}, "table holds an id that is no block"),
        ({"ref_count": lambda refs: refs.at[0].add(1)}, "ref_count differs"),
        ({"block_table": lambda t: t.at[1, 0].set(t[0, 0])}, "ref_count differs"),
        ({"free_list": lambda free: free.at[0].set(0)}, "both free and referenced"),
        ({"free_top": lambda top: top - 1}, "neither free nor referenced"),
        (
            {"block_table": lambda t: t.at[0, 1].set(-1).at[0, 2].set(t[0, 1])},
            "exactly in its first columns",
        ),
        ({"seq_block_count": lambda count: count.at[0].set(1)}, "exactly in its first columns"),
        ({"seq_lens": lambda lens: lens.at[0].set(4)}, "differs from what seq_lens need"),
        ({"seq_lens": lambda lens: lens.at[0].set(9)}, "differs from what seq_lens need"),
        ({"seq_lens": lambda lens: lens.at[3].set(1)}, "differs from what seq_lens need"),
        ({"seq_lens": lambda lens: lens.at[3].set(-3)}, "outside its range"),
    ],
)
def test_check_invariants_finds_what_was_corrupted_by_hand(changes: dict, message: str):
    assert pkv.check_invariants(started(5, 4)) == []
    broken = pkv.check_invariants(corrupted(**changes))
    assert any(message in line for line in broken), broken


@pytest.mark.parametrize(
    "call",
    [
        lambda state: pkv.append(state, jnp.zeros(2), 1),
        lambda state: pkv.free(state, jnp.zeros(2)),
    ],
)
def test_ids_that_are_not_integers_are_refused_by_name(call):
    with pytest.raises(TypeError, match="seq_ids has dtype float32"):
        call(started(1))


def test_ids_and_counts_of_the_wrong_shape_are_refused_by_name():
    state = started(1)
    with pytest.raises(ValueError, match=r"seq_ids has shape \(\); it must have 1 dim"):
        pkv.append(state, jnp.int32(0), 1)
    with pytest.raises(
        ValueError, match=r"token count has shape \(3,\).*one entry per row: \(2,\)"
    ):
        pkv.append(state, ids(0, 1), ids(1, 2, 3))
    with pytest.raises(TypeError, match="token count has dtype float32"):
        pkv.append(state, ids(0, 1), jnp.ones(2))


def test_unsigned_and_64_bit_values_never_wrap_into_valid_ones():
    state = started(3)
    _, result = append(state, jnp.array([2**32 - 1], jnp.uint32), 1)  # as int32 it would be -1
    assert result.tolist() == [-2]
    _, result = append(state, ids(0), jnp.array([2**32 - 1], jnp.uint32))
    assert result.tolist() == [-3]
    with jax.enable_x64(True):
        _, result = pkv.append(state, jnp.array([2**32]), jnp.array([1]))
        assert result.tolist() == [-2]
        _, result = pkv.append(state, ids(0), jnp.array([2**32 + 1]))
        assert result.tolist() == [-3]
