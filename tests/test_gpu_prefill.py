"""Mosaic GPU paged prefill on a Hopper GPU: options by shapes against float64, poison, mixed batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_rounds_well, attention, make_case, random_options

from paged_kv_jax.kernels import attention_mosaic_gpu as both
from paged_kv_jax.kernels import prefill_mosaic_gpu as prefill

pytestmark = pytest.mark.gpu

ALL_OPTIONS = ("scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes")

# (H, K), D, P, dtype, options: every value of each beside several of the others.
MATRIX = [
    ((8, 2), 128, 16, "bfloat16", ()),
    ((8, 2), 128, 1, "bfloat16", ("sliding_window",)),
    ((4, 1), 128, 64, "float16", ("logits_soft_cap",)),
    ((4, 2), 128, 256, "bfloat16", ALL_OPTIONS),
    ((9, 3), 64, 16, "bfloat16", ("sinks",)),
    ((3, 1), 64, 2, "float16", ("alibi_slopes",)),
    ((8, 2), 64, 16, "bfloat16", ("scale",)),
    ((5, 1), 96, 8, "bfloat16", ("sliding_window", "sinks")),
    ((2, 2), 128, 32, "bfloat16", ("scale",)),
    ((8, 1), 64, 128, "bfloat16", ("logits_soft_cap", "alibi_slopes")),
    ((4, 1), 192, 16, "bfloat16", ("alibi_slopes",)),
    ((4, 2), 256, 8, "bfloat16", ALL_OPTIONS),
    ((2, 1), 256, 128, "float16", ()),
    ((4, 2), 80, 16, "float16", ALL_OPTIONS),
    ((3, 1), 112, 4, "bfloat16", ("sinks",)),
    ((2, 1), 32, 16, "bfloat16", ()),
    ((2, 2), 16, 16, "float16", ("sliding_window",)),
]


@functools.cache
def compiled(function, max_query_len, **static):
    return jax.jit(functools.partial(function, max_query_len=max_query_len, **static))


def run(case, function=prefill.paged_attention, **options):
    """(out, lse) of a kernel on a case of the oracle."""
    options = {"scale": case.q.shape[-1] ** -0.5, **options}
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    out, lse = compiled(function, case.max_query_len, **static)(*case.raw, **arrays)
    return np.asarray(out), np.asarray(lse)


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def check(case, out, lse, **options):
    assert_rounds_well(out, case, **options)
    _, exact_lse = attention(case, **options)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype", "names"), MATRIX)
def test_matches_float64_and_never_sees_dead_slots(heads, head_dim, block_size, dtype, names):
    rng = np.random.default_rng(0)
    # Tails of every size, rows shorter than their queries, empty rows, rows without queries, and tokens
    # of no row; 223 tokens are no multiple of anything.
    q_lens, kv_lens = [70, 1, 0, 101, 9, 30, 7], [300, 129, 70, 101, 1, 0, 260]
    case = make_case(
        rng,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_tokens=sum(q_lens) + 5,
    )
    options = random_options(rng, heads[0], *names)
    window = options.get("sliding_window")
    out, lse = run(case.with_unseen(np.nan, window), **options)
    check(case, out, lse, **options)
    for value in (0.0, np.inf):
        other_out, other_lse = run(case.with_unseen(value, window), **options)
        np.testing.assert_array_equal(bits(out), bits(other_out))
        np.testing.assert_array_equal(bits(lse), bits(other_lse))


def test_window_longer_than_a_tile():
    case = make_case(
        np.random.default_rng(1), q_lens=[150, 60], kv_lens=[700, 400], num_heads=4, num_kv_heads=1,
        head_dim=128, dtype="bfloat16",
    ).with_unseen(np.nan, 300)  # fmt: skip
    out, lse = run(case, sliding_window=300)
    check(case, out, lse, sliding_window=300)


@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 6000), (20, 9000)])
def test_long_rows_are_split(q_len, kv_len):
    case = make_case(
        np.random.default_rng(2), q_lens=[q_len], kv_lens=[kv_len], num_heads=2, num_kv_heads=1,
        head_dim=128, dtype="bfloat16", num_tokens=64,
    )  # fmt: skip
    out, lse = run(case)
    check(case, out, lse)
    for _ in range(3):
        again = run(case)
        np.testing.assert_array_equal(bits(out), bits(again[0]))
        np.testing.assert_array_equal(bits(lse), bits(again[1]))


@pytest.mark.parametrize("kv_len", [100, 5000])
def test_without_a_causal_mask_every_query_sees_the_whole_row(kv_len):
    queries = 40
    # What it should be: each query the last one of a row of its own.
    rows = make_case(
        np.random.default_rng(3), q_lens=[1] * queries, kv_lens=[kv_len] + [0] * (queries - 1),
        num_heads=4, num_kv_heads=2, head_dim=128, dtype="bfloat16", poison=np.nan,
    )  # fmt: skip
    rows = dataclasses.replace(
        rows,
        block_table=np.repeat(rows.block_table[:1], queries, axis=0),
        kv_lens=np.full(queries, kv_len, np.int32),
    )
    one = dataclasses.replace(
        rows,
        block_table=rows.block_table[:1],
        kv_lens=rows.kv_lens[:1],
        cu_q_lens=np.array([0, queries], np.int32),
    )
    out, lse = run(one, causal=False)
    check(rows, out, lse)


@pytest.mark.parametrize("names", [(), ALL_OPTIONS])
def test_decode_rows_among_longer_ones(names):
    rng = np.random.default_rng(4)
    q_lens = [1, 70, 1, 1, 9, 3, 0, 1, 150, 1]
    kv_lens = [500, 150, 1, 0, 90, 40, 20, 1300, 150, 64]
    case = make_case(
        rng, q_lens=q_lens, kv_lens=kv_lens, num_heads=8, num_kv_heads=2, head_dim=128,
        dtype="bfloat16", num_tokens=sum(q_lens) + 9,
    )  # fmt: skip
    options = random_options(rng, 8, *names)
    case = case.with_unseen(np.nan, options.get("sliding_window"))
    out, lse = run(case, both.paged_attention, **options)
    check(case, out, lse, **options)


def test_large_float16_values_do_not_overflow():
    case = make_case(
        np.random.default_rng(5), q_lens=[100, 20], kv_lens=[300, 20], num_heads=4, num_kv_heads=2,
        head_dim=128, dtype="float16", magnitude=300.0,
    )  # fmt: skip
    check(case, *run(case))


def test_any_lengths_compile_once():
    rng = np.random.default_rng(6)
    function = jax.jit(functools.partial(prefill.paged_attention, max_query_len=90, scale=0.125))
    for longest in (90, 5, 30):
        q_lens = [int(n) for n in rng.integers(0, longest, 60)]
        kv_lens = [n + int(extra) for n, extra in zip(q_lens, rng.integers(0, 40, 60), strict=True)]
        blocks = sum(-(-n // 16) for n in kv_lens)
        case = make_case(
            rng, q_lens=q_lens, kv_lens=kv_lens, num_heads=1, num_kv_heads=1, head_dim=64,
            dtype="bfloat16", num_tokens=60 * 90, max_blocks=9, spare_blocks=600 - blocks,
        )  # fmt: skip
        check(case, *function(*case.raw))
    assert function._cache_size() == 1


def test_blocks_past_two_to_the_31_elements():
    rng = np.random.default_rng(7)
    block_size, num_kv_heads, head_dim = 16, 8, 128
    small = make_case(
        rng, q_lens=[70, 30], kv_lens=[300, 30], num_heads=16, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype="bfloat16", spare_blocks=0, num_layers=1, layer=0,
    )  # fmt: skip
    num_blocks = 70_000  # of each of 2 layers: 2.3e9 elements a pool
    top = num_blocks - small.k_pool.shape[1]

    @jax.jit
    def huge(values):
        pool = jnp.full((2, num_blocks, block_size, num_kv_heads, head_dim), jnp.nan, values.dtype)
        return pool.at[1, top:].set(values[0])

    table = np.where(small.block_table >= 0, small.block_table + top, -1).astype(np.int32)
    pools = [huge(jnp.asarray(pool)) for pool in (small.k_pool, small.v_pool)]
    assert pools[0].size > 2**31
    out, _ = compiled(prefill.paged_attention, small.max_query_len, scale=head_dim**-0.5)(
        jnp.asarray(small.q), *pools, jnp.int32(1), jnp.asarray(table),
        jnp.asarray(small.kv_lens), jnp.asarray(small.cu_q_lens),
    )  # fmt: skip
    expected, _ = run(small)
    assert_rounds_well(np.asarray(out), small)
    np.testing.assert_array_equal(bits(out), bits(expected))
