"""Mosaic GPU paged decode lowers for CUDA, without a GPU: every family of shapes it says it supports."""

import functools

import jax
import jax.numpy as jnp
import pytest

from paged_kv_jax.kernels import decode_mosaic_gpu as decode
from paged_kv_jax.kernels.decode_problem import Problem

# (H, K), D, P, dtype, max_query_len, options: each value of each beside several of the others.
CALLS = [
    ((32, 8), 128, 16, "bfloat16", 1, ()),
    ((32, 8), 128, 1, "float16", 4, ("window",)),
    ((64, 8), 128, 256, "bfloat16", 8, ("cap", "sinks")),
    ((32, 1), 128, 16, "bfloat16", 1, ("slopes",)),
    ((9, 3), 64, 16, "bfloat16", 1, ()),
    ((9, 3), 64, 2, "bfloat16", 3, ("cap", "window", "sinks", "slopes")),
    ((71, 1), 64, 128, "float16", 2, ("sinks",)),
    ((12, 12), 64, 8, "bfloat16", 8, ("window", "slopes")),
    ((28, 4), 96, 32, "bfloat16", 5, ("window",)),
    ((8, 2), 96, 4, "float16", 1, ("slopes",)),
    ((64, 4), 192, 64, "bfloat16", 1, ("cap",)),
    ((16, 1), 192, 8, "float16", 6, ()),
    ((8, 4), 256, 16, "bfloat16", 8, ("sinks", "slopes")),
    ((64, 1), 256, 128, "float16", 1, ("cap", "window")),
    ((8, 8), 80, 16, "bfloat16", 2, ()),
    ((63, 1), 112, 16, "bfloat16", 7, ("cap",)),
    ((4, 2), 16, 16, "bfloat16", 1, ("sinks",)),
    ((5, 5), 32, 64, "float16", 1, ("window",)),
]
LAYERS, BLOCKS = 2, 100


def shapes(heads, head_dim, block_size, dtype, max_query_len, num_rows=5, num_columns=7):
    pool = jax.ShapeDtypeStruct((LAYERS, BLOCKS, block_size, heads[1], head_dim), dtype)
    q = jax.ShapeDtypeStruct((num_rows * max_query_len + 2, heads[0], head_dim), dtype)
    table, lens, cu_lens, layer = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((num_rows, num_columns), (num_rows,), (num_rows + 1,), ())
    )
    return q, pool, pool, layer, table, lens, cu_lens


def lower(args, max_query_len, options=()) -> str:
    per_head = jax.ShapeDtypeStruct(args[0].shape[1:2], jnp.float32)
    arrays = {
        keyword: per_head
        for name, keyword in (("sinks", "sinks"), ("slopes", "alibi_slopes"))
        if name in options
    }
    function = functools.partial(
        decode.paged_attention,
        max_query_len=max_query_len,
        scale=0.1,
        logits_soft_cap=30.0 if "cap" in options else None,
        sliding_window=100 if "window" in options else None,
    )
    lowered = jax.jit(function).trace(*args, **arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "max_query_len", "options"), CALLS
)
def test_lowers_for_cuda(heads, head_dim, block_size, dtype, max_query_len, options):
    args = shapes(heads, head_dim, block_size, dtype, max_query_len)
    reason = decode.paged_attention_unsupported_reason(
        args[0], args[1], max_query_len=max_query_len, compute_capability=9.0
    )
    assert reason is None
    assert "mosaic_gpu" in lower(args, max_query_len, options)


@pytest.mark.parametrize("num_rows", [1, 3, 1000])
def test_lowers_for_any_batch(num_rows):
    assert "mosaic_gpu" in lower(shapes((32, 8), 128, 16, "bfloat16", 1, num_rows=num_rows), 1)


@pytest.mark.parametrize(
    ("q_shape", "q_dtype", "pool_shape", "pool_dtype", "max_query_len", "capability", "named"),
    [
        ((4, 8, 128), "bfloat16", (1, 4, 16, 2, 128), "bfloat16", 1, None, "no NVIDIA GPU"),
        ((4, 8, 128), "bfloat16", (1, 4, 16, 2, 128), "bfloat16", 1, 8.0, "compute_capability=8.0"),
        ((4, 8, 128), "bfloat16", (1, 4, 16, 2, 128), "bfloat16", 1, 10.0, "compute_capability=10"),
        ((9, 8, 128), "bfloat16", (1, 4, 16, 2, 128), "bfloat16", 9, 9.0, "max_query_len=9"),
        ((4, 8, 120), "bfloat16", (1, 4, 16, 2, 120), "bfloat16", 1, 9.0, "head_dim=120"),
        ((4, 8, 512), "bfloat16", (1, 4, 16, 2, 512), "bfloat16", 1, 9.0, "head_dim=512"),
        ((4, 8, 128), "bfloat16", (1, 4, 24, 2, 128), "bfloat16", 1, 9.0, "block_size=24"),
        ((4, 8, 128), "bfloat16", (1, 4, 512, 2, 128), "bfloat16", 1, 9.0, "block_size=512"),
        ((4, 8, 128), "float32", (1, 4, 16, 2, 128), "float32", 1, 9.0, "float32"),
        ((4, 8, 128), "bfloat16", (1, 4, 16, 2, 128), "float16", 1, 9.0, "float16"),
    ],
)
def test_refuses_with_a_reason_that_names_the_value(
    q_shape, q_dtype, pool_shape, pool_dtype, max_query_len, capability, named
):
    q = jax.ShapeDtypeStruct(q_shape, q_dtype)
    pool = jax.ShapeDtypeStruct(pool_shape, pool_dtype)
    reason = decode.paged_attention_unsupported_reason(
        q, pool, max_query_len=max_query_len, compute_capability=capability
    )
    assert named in reason


@pytest.mark.parametrize(
    ("tuning", "named"),
    [(decode.Tuning(tile_tokens=96), "tile_tokens=96"), (decode.Tuning(stages=1), "stages=1")],
)
def test_refuses_sizes_that_cannot_work(tuning, named):
    args = shapes((32, 8), 128, 16, "bfloat16", 1)
    with pytest.raises(ValueError, match=named):
        decode.paged_attention(*args, max_query_len=1, scale=0.1, tuning=tuning)


def problem(group, kv_heads=8, head_dim=128, max_query_len=1) -> Problem:
    return Problem(
        num_rows=4,
        num_tokens=4 * max_query_len,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=16,
        max_query_len=max_query_len,
        itemsize=2,
        tuning=decode.DEFAULT_TUNING,
    )


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("max_query_len", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 63, 64, 71])
def test_columns_hold_every_query_once(group, max_query_len, head_dim):
    p = problem(group, head_dim=head_dim, max_query_len=max_query_len)
    assert p.chunk_heads * p.head_chunks >= group > p.chunk_heads * (p.head_chunks - 1)
    assert p.token_columns * p.token_groups >= max_query_len
    assert p.token_columns * (p.token_groups - 1) < max_query_len
    assert p.columns % 8 == 0
    assert p.chunk_heads <= p.head_columns
    assert p.tile_tokens % 64 == 0
    assert p.stages >= 2
