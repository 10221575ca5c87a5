"""Plans: which token sits where, which slot it is written to, and what is left out, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv

CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=16, block_size=4, max_seqs=5,
    max_blocks_per_seq=4,
)  # fmt: skip
OVERFLOW = pkv.ResultCode.PLAN_OVERFLOW.bit

allocate = jax.jit(pkv.allocate)
append = jax.jit(pkv.append, static_argnums=2)
make_plan = jax.jit(pkv.make_plan, static_argnums=2)
make_ragged_plan = jax.jit(pkv.make_plan, static_argnames=("num_tokens", "max_query_len"))
plan_from_tables = jax.jit(
    pkv.plan_from_tables, static_argnames=("block_size", "num_tokens", "max_query_len")
)


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def scattered() -> pkv.BlockState:
    """Sequences 0 to 4 of 5, 9, 4, 0 and 12 tokens, whose blocks are not in order."""
    state = pkv.init(CONFIG)
    state, _ = allocate(state, ids(4, 1, 0, 2), ids(4, 5, 3, 1))
    state, result = allocate(state, ids(0, 4, 2, 1), ids(2, 8, 3, 4))
    assert np.all(np.asarray(result) >= 0)
    return state


def expected(
    block_table, q_lens, kv_lens, num_tokens: int, uniform: int | None = None
) -> dict[str, list[int]]:
    """slots, positions and rows of each place, in plain Python; rows with kv_len 0 take no part."""
    slots, positions, rows = [], [], []
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if kv_len == 0:
            empty = uniform or 0
            slots, positions, rows = (
                slots + [-1] * empty,
                positions + [0] * empty,
                rows + [-1] * empty,
            )
            continue
        for position in range(kv_len - q_len, kv_len):
            slots.append(int(block_table[row][position // 4]) * 4 + position % 4)
            positions.append(position)
            rows.append(row)
    rest = num_tokens - len(slots)
    return dict(
        slot_mapping=slots + [-1] * rest,
        positions=positions + [0] * rest,
        token_rows=rows + [-1] * rest,
        kv_lens=list(kv_lens),
    )


def assert_plan(plan: pkv.Plan, values: dict[str, list[int]]) -> None:
    for name, value in values.items():
        assert getattr(plan, name).tolist() == value, name


def assert_same_plan(plan: pkv.Plan, other: pkv.Plan) -> None:
    jax.tree.map(np.testing.assert_array_equal, plan, other)
    assert jax.tree.structure(plan) == jax.tree.structure(other)


@pytest.mark.parametrize("count", [1, 3])
def test_uniform_plans_give_every_row_its_places(count: int):
    rows = ids(1, -1, 0, 3, 4, 9)  # 3 is not live, 9 out of range
    state, result = append(scattered(), rows, count)
    assert result.tolist()[3:] == [-2, 1, -2]
    plan = make_plan(state, rows, count, result)
    kv_lens = [9 + count, 0, 5 + count, 0, 12 + count, 0]
    table = np.asarray(state.block_table)[[1, 0, 0, 0, 4, 0]]
    assert_plan(plan, expected(table, [count] * 6, kv_lens, 6 * count, uniform=count))
    assert plan.cu_q_lens.tolist() == [count * b for b in range(7)]
    assert plan.last_tokens.tolist() == [count * b + count - 1 for b in range(6)]
    assert plan.max_query_len == count
    assert plan.block_size == 4
    assert (plan.num_rows, plan.num_tokens) == (6, 6 * count)
    assert int(plan.errors) == 0


def test_plan_tables_hold_only_the_rows_that_take_part():
    rows = ids(1, -1, 3)
    state, result = append(scattered(), rows, 1)
    plan = make_plan(state, rows, 1, result)
    np.testing.assert_array_equal(plan.block_table[0], state.block_table[1])
    assert np.all(np.asarray(plan.block_table[1:]) == -1)


def test_ragged_plans_pack_the_rows_one_after_another():
    rows, counts = ids(4, -1, 0, 3, 2, 1), ids(3, 7, 1, 4, 0, 6)
    state, result = allocate(scattered(), rows, counts)  # starts sequence 3
    assert result.tolist() == [1, 0, 0, 1, 0, 1]
    plan = make_ragged_plan(state, rows, counts, result, num_tokens=17, max_query_len=6)
    q_lens, kv_lens = [3, 0, 1, 4, 0, 6], [15, 0, 6, 4, 0, 15]
    table = np.asarray(state.block_table)[[4, 0, 0, 3, 2, 1]]
    assert_plan(plan, expected(table, q_lens, kv_lens, 17))
    assert plan.cu_q_lens.tolist() == [0, 3, 3, 4, 8, 8, 14]
    assert plan.last_tokens.tolist() == [2, 2, 3, 7, 7, 13]
    assert plan.max_query_len == 6
    assert int(plan.errors) == 0


def test_last_tokens_is_a_valid_index_where_nothing_comes_first():
    state, result = append(scattered(), ids(-1, 0), 1)
    plan = make_ragged_plan(state, ids(-1, 0), ids(1, 1), result, num_tokens=3)
    assert plan.last_tokens.tolist() == [0, 0]


def test_rows_that_failed_take_no_part():
    state = pkv.init(CONFIG)
    rows, counts = ids(0, 1, 2, 3), ids(16, 16, 16, 15)
    state, result = allocate(state, rows, counts)
    state, result = append(state, rows, 2)
    assert result.tolist() == [-3, -3, -3, -3]
    plan = make_plan(state, rows, 2, result)
    assert_plan(plan, dict(kv_lens=[0] * 4, slot_mapping=[-1] * 8, positions=[0] * 8))
    state, result = append(state, rows, 1)
    plan = make_plan(state, rows, 1, result)
    assert plan.kv_lens.tolist() == [0, 0, 0, 16]
    assert plan.slot_mapping.tolist()[:3] == [-1] * 3
    ragged = make_ragged_plan(state, rows, ids(1, 1, 1, 1), result, num_tokens=4)
    assert ragged.cu_q_lens.tolist() == [0, 0, 0, 0, 1]


def test_duplicate_rows_take_part_once():
    state, result = append(scattered(), ids(0, 0), 1)
    plan = make_plan(state, ids(0, 0), 1, result)
    assert plan.kv_lens.tolist() == [6, 0]
    assert plan.slot_mapping[1] == -1


@pytest.mark.parametrize(
    ("num_tokens", "max_query_len", "taken"),
    [
        (14, 6, [3, 1, 4, 6]),
        (13, 6, [3, 1, 4, 0]),  # the last is one token too long
        (7, 6, [3, 1, 0, 0]),  # nor is anyone behind it served
        (2, 2, [0, 1, 0, 0]),
        (14, 3, [3, 1, 0, 0]),  # rows above max_query_len go, those behind them stay
        (14, 5, [3, 1, 4, 0]),
    ],
)
def test_rows_that_do_not_fit_are_left_out_whole_and_reported(num_tokens, max_query_len, taken):
    rows, counts = ids(4, 0, 3, 1), ids(3, 1, 4, 6)
    state, result = allocate(scattered(), rows, counts)
    plan = make_ragged_plan(
        state, rows, counts, result, num_tokens=num_tokens, max_query_len=max_query_len
    )
    assert np.diff(np.asarray(plan.cu_q_lens)).tolist() == taken
    kv_lens = [kv * (q > 0) for kv, q in zip([15, 6, 4, 15], taken, strict=True)]
    table = np.asarray(state.block_table)[[4, 0, 3, 1]]
    assert_plan(plan, expected(table, taken, kv_lens, num_tokens))
    assert int(plan.errors) == (OVERFLOW if taken != [3, 1, 4, 6] else 0)


def test_a_small_row_does_not_slip_past_one_that_found_no_place():
    rows, counts = ids(1, 0), ids(6, 1)
    state, result = append_array(scattered(), rows, counts)
    plan = make_ragged_plan(state, rows, counts, result, num_tokens=5, max_query_len=5)
    assert np.diff(np.asarray(plan.cu_q_lens)).tolist() == [0, 1]  # too long for any place: skipped
    rows, counts = ids(4, 1, 0), ids(3, 3, 1)
    state, result = append_array(scattered(), rows, counts)
    plan = make_ragged_plan(state, rows, counts, result, num_tokens=5)
    assert np.diff(np.asarray(plan.cu_q_lens)).tolist() == [3, 0, 0]
    assert int(plan.errors) == OVERFLOW


append_array = jax.jit(pkv.append)


@pytest.mark.parametrize("count", [2**31 - 1, 2**30, -1, -(2**31)])
def test_nonsense_query_lengths_are_left_out_and_reported(count: int):
    table = ids(0, 1, 2, 3).reshape(2, 2)
    plan = plan_from_tables(table, ids(5, 6), ids(count, 2), block_size=4, num_tokens=4)
    assert np.diff(np.asarray(plan.cu_q_lens)).tolist() == [0, 2]
    assert plan.slot_mapping.tolist() == [12, 13, -1, -1]
    assert int(plan.errors) == OVERFLOW


def test_rows_whose_lengths_contradict_their_tables_are_left_out_and_reported():
    table = ids(0, 1, 2, 3, 4, 5).reshape(3, 2)
    for kv_lens, q_lens in ((ids(9, 3, 8), ids(1, 4, 1)), (ids(2**31 - 1, 3, 8), ids(1, 4, 1))):
        plan = plan_from_tables(table, kv_lens, q_lens, block_size=4, num_tokens=6)
        assert plan.kv_lens.tolist() == [0, 0, 8]  # past the table; more queries than keys; fine
        assert int(plan.errors) == OVERFLOW
    plan = pkv.plan_from_tables(table, ids(9, 1, 8), 2, block_size=4)
    assert plan.kv_lens.tolist() == [0, 0, 8]
    assert plan.slot_mapping.tolist() == [-1, -1, -1, -1, 22, 23]
    assert int(plan.errors) == OVERFLOW


def test_places_without_a_block_are_written_nowhere():
    plan = plan_from_tables(
        ids(-1, 3).reshape(1, 2), ids(6), ids(4), block_size=4, num_tokens=4
    )  # the first block is behind a window
    assert plan.slot_mapping.tolist() == [-1, -1, 12, 13]


def test_plan_from_tables_is_the_plan_of_the_state_it_was_read_from():
    rows, counts = ids(4, 0, 1), ids(3, 1, 6)
    state, result = append_array(scattered(), rows, counts)
    table, kv_lens = state.block_table[rows], state.seq_lens[rows]
    assert_same_plan(
        make_ragged_plan(state, rows, counts, result, num_tokens=12, max_query_len=8),
        plan_from_tables(table, kv_lens, counts, block_size=4, num_tokens=12, max_query_len=8),
    )
    state, result = append(scattered(), rows, 2)
    table, kv_lens = state.block_table[rows], state.seq_lens[rows]
    assert_same_plan(
        make_plan(state, rows, 2, result), pkv.plan_from_tables(table, kv_lens, 2, block_size=4)
    )


def test_max_query_len_defaults_to_num_tokens():
    table = ids(0, 1).reshape(1, 2)
    plan = pkv.plan_from_tables(table, ids(5), ids(2), block_size=4, num_tokens=7)
    assert plan.max_query_len == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_lens=ids(1, 1)), "num_tokens is required"),
        (dict(q_lens=ids(1, 1), num_tokens=0), "num_tokens=0"),
        (dict(q_lens=ids(1, 1), num_tokens=4, max_query_len=5), "max_query_len=5"),
        (dict(q_lens=ids(1, 1), num_tokens=4, max_query_len=0), "max_query_len=0"),
        (dict(q_lens=ids(1), num_tokens=4), "query lengths have shape"),
        (dict(q_lens=0), "query length of every row is 0"),
        (dict(q_lens=1, num_tokens=2), "num_tokens=2"),
        (dict(block_size=6), "block_size=6 must be a power of two"),
        (dict(kv_lens=ids(1)), "block_table has 2 rows and kv_lens 1"),
        (dict(block_table=ids(0, 1)), r"block_table has shape \(2,\)"),
    ],
)
def test_static_mistakes_are_refused_by_name(change: dict, message: str):
    arguments = dict(
        block_table=ids(0, 1, 2, 3).reshape(2, 2), kv_lens=ids(5, 6), q_lens=1, block_size=4
    )
    with pytest.raises(ValueError, match=message):
        pkv.plan_from_tables(**{**arguments, **change})


def test_results_of_another_batch_are_refused():
    with pytest.raises(ValueError, match=r"result has shape \(3,\) and seq_ids \(2,\)"):
        pkv.make_plan(scattered(), ids(0, 1), 1, ids(0, 0, 0))
    with pytest.raises(TypeError, match="kv_lens has dtype float32"):
        pkv.plan_from_tables(ids(0, 1).reshape(1, 2), jnp.ones(1), 1, block_size=4)
