"""Mosaic GPU paged prefill lowers for CUDA, without a GPU, and shares out its work as it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_kv_jax.kernels import attention_mosaic_gpu as attention
from paged_kv_jax.kernels import prefill_mosaic_gpu as prefill
from paged_kv_jax.kernels.prefill_problem import Problem
from paged_kv_jax.kernels.prefill_schedule import ITEM_COST, Schedule

# (H, K), D, P, dtype, T, options: each value of each beside several of the others.
CALLS = [
    ((32, 8), 128, 16, "bfloat16", 4096, ()),
    ((64, 8), 128, 256, "float16", 1000, ("cap", "sinks", "all")),
    ((9, 3), 64, 2, "bfloat16", 77, ("cap", "window", "sinks", "slopes")),
    ((28, 4), 96, 32, "bfloat16", 40, ("window",)),
    ((64, 4), 192, 1, "float16", 300, ("slopes",)),
    ((8, 4), 256, 128, "bfloat16", 129, ("sinks",)),
    ((5, 5), 16, 4, "bfloat16", 64, ()),
]


def shapes(heads, head_dim, block_size, dtype, num_tokens, num_rows=3):
    pool = jax.ShapeDtypeStruct((2, 100, block_size, heads[1], head_dim), dtype)
    q = jax.ShapeDtypeStruct((num_tokens, heads[0], head_dim), dtype)
    table, lens, cu_lens, layer = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((num_rows, 7), (num_rows,), (num_rows + 1,), ())
    )
    return q, pool, pool, layer, table, lens, cu_lens


def lower(function, args, options=(), **static) -> str:
    per_head = jax.ShapeDtypeStruct(args[0].shape[1:2], jnp.float32)
    arrays = {
        keyword: per_head
        for name, keyword in (("sinks", "sinks"), ("slopes", "alibi_slopes"))
        if name in options
    }
    function = functools.partial(
        function,
        scale=0.1,
        logits_soft_cap=30.0 if "cap" in options else None,
        sliding_window=100 if "window" in options else None,
        causal="all" not in options,
        **static,
    )
    lowered = jax.jit(function).trace(*args, **arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "num_tokens", "options"), CALLS
)
def test_lowers_for_cuda(heads, head_dim, block_size, dtype, num_tokens, options):
    args = shapes(heads, head_dim, block_size, dtype, num_tokens)
    reason = prefill.paged_attention_unsupported_reason(
        args[0], args[1], max_query_len=num_tokens, compute_capability=9.0
    )
    assert reason is None
    assert "paged_prefill" in lower(
        prefill.paged_attention, args, options, max_query_len=num_tokens
    )


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "max_query_len", "launches"),
    [
        (2, 16, 8, ["paged_decode"]),
        (1, 300, 300, ["paged_prefill"]),
        (2, 40, 20, ["paged_prefill"]),
        (2, 300, 300, ["paged_prefill", "paged_decode"]),
    ],
    ids=["decode", "one row", "rows of one length", "any rows"],
)
def test_launches_what_the_shapes_allow(num_rows, num_tokens, max_query_len, launches):
    args = shapes((2, 1), 64, 16, "bfloat16", num_tokens, num_rows)
    text = lower(attention.paged_attention, args, max_query_len=max_query_len)
    for name in ("paged_decode", "paged_prefill"):
        assert (name in text) == (name in launches)


@pytest.mark.parametrize(
    ("q", "pool", "options", "named"),
    [
        (((90, 8, 128), "bfloat16"), ((1, 4, 16, 2, 128), "bfloat16"), {}, "no NVIDIA GPU"),
        (
            ((90, 8, 128), "bfloat16"), ((1, 4, 16, 2, 128), "bfloat16"),
            {"compute_capability": 8.0}, "compute_capability=8.0",
        ),
        (
            ((90, 8, 120), "bfloat16"), ((1, 4, 16, 2, 120), "bfloat16"),
            {"compute_capability": 9.0}, "head_dim=120",
        ),
        (
            ((90, 8, 128), "bfloat16"), ((1, 4, 24, 2, 128), "bfloat16"),
            {"compute_capability": 9.0}, "block_size=24",
        ),
        (
            ((90, 8, 128), "float32"), ((1, 4, 16, 2, 128), "float32"),
            {"compute_capability": 9.0}, "float32",
        ),
        (
            ((90, 8, 128), "float16"), ((1, 4, 16, 2, 128), "float16"),
            {"compute_capability": 9.0, "causal": False, "sliding_window": 5}, "sliding_window=5",
        ),
        (
            ((90, 8, 128), "float16"), ((1, 4, 16, 2, 128), "float16"),
            {"compute_capability": 9.0, "causal": False, "alibi_slopes": np.ones(8)}, "ALiBi",
        ),
    ],
)  # fmt: skip
def test_refuses_with_a_reason_that_names_the_value(q, pool, options, named):
    q, pool = (jax.ShapeDtypeStruct(*x) for x in (q, pool))
    reason = attention.paged_attention_unsupported_reason(q, pool, max_query_len=90, **options)
    assert named in reason


@pytest.mark.parametrize(
    ("tuning", "named"),
    [(prefill.Tuning(tile_tokens=96), "tile_tokens=96"), (prefill.Tuning(k_stages=9), "'k': 9")],
)
def test_refuses_sizes_that_cannot_work(tuning, named):
    args = shapes((32, 8), 128, 16, "bfloat16", 90)
    with pytest.raises(ValueError, match=named):
        prefill.paged_attention(*args, max_query_len=90, scale=0.1, tuning=tuning)


def test_refuses_more_work_than_int32_counts():
    q, pool, _, layer, _, lens, cu_lens = shapes((128, 128), 64, 16, "bfloat16", 2**20)
    table = jax.ShapeDtypeStruct((3, 2**17), jnp.int32)
    with pytest.raises(ValueError, match="more than int32 counts"):
        prefill.paged_attention(
            q, pool, pool, layer, table, lens, cu_lens, max_query_len=2**20, scale=0.1
        )


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 71])
def test_items_hold_every_head_once_and_fit(group, head_dim):
    p = Problem(
        num_rows=4, num_tokens=500, kv_heads=8, group=group, head_dim=head_dim, block_size=16,
        itemsize=2, tuning=prefill.DEFAULT_TUNING,
    )  # fmt: skip
    assert p.units * p.item_heads == 8 * group
    assert group % p.item_heads == 0  # all of an item's heads have the same K and V
    assert p.item_tokens * p.item_heads == 64 * p.warpgroups
    assert min(p.stages.values()) >= 2


@pytest.mark.parametrize(("q_len", "kv_len"), [(500, 500), (300, 2000), (700, 300), (200, 0)])
@pytest.mark.parametrize(
    ("sizes", "window"), [((64, 128), None), ((128, 64), 150), ((192, 128), 1)]
)
def test_lengths_up_to_an_item_are_their_sums_and_find_it_again(q_len, kv_len, sizes, window):
    item_tokens, tile_tokens = sizes
    schedule = Schedule(
        num_rows=1, ctas=1, kv_lens_gmem=jnp.array([kv_len]), plan_smem=None, units=1,
        cu_q_lens_gmem=jnp.array([0, q_len]), item_tokens=item_tokens, tile_tokens=tile_tokens,
        causal=True, window=window, min_query_len=1,
    )  # fmt: skip
    row = schedule.row(0)
    count = -(-q_len // item_tokens)
    tiles = []
    for i in range(count):
        first_query = kv_len - q_len + i * item_tokens
        end = min(first_query + item_tokens, kv_len)
        if kv_len < q_len:  # counted as if the row had as many keys as queries
            end = min((i + 1) * item_tokens, q_len)
        low = 0 if window is None else max(first_query + 1 - window, 0)
        tiles.append(-(-end // tile_tokens) - low // tile_tokens if kv_len else 1)
    lengths = [ITEM_COST + n for n in tiles]
    assert row.token_tiles == count
    numbers = jnp.arange(count + 1)
    up_to = jax.vmap(lambda n: schedule.length_up_to(row, n))(numbers)
    np.testing.assert_array_equal(up_to, np.cumsum([0, *lengths]))
    # From both ends in turn: the last, the first, the last but one ...
    order = [count - 1 - n // 2 if n % 2 == 0 else n // 2 for n in range(count)]
    starts = np.cumsum([0] + [lengths[i] for i in order])
    places = jnp.arange(starts[-1], dtype=jnp.int32)
    item, start = jax.jit(jax.vmap(lambda at: schedule._find(row, at)))(places)
    wanted = np.searchsorted(starts, places, side="right") - 1
    np.testing.assert_array_equal(item, wanted)
    np.testing.assert_array_equal(start, starts[wanted])
