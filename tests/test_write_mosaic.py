"""Mosaic GPU `write` and `copy_blocks`, without a GPU: they lower for CUDA, and give the right values
in JAX's GPU interpreter (JAX 0.11 and newer)."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged_kv_jax.kernels import copy_mosaic_gpu, write_mosaic_gpu

has_interpreter = hasattr(plgpu, "force_gpu_interpret_mode")
interpreted = pytest.mark.skipif(
    not has_interpreter, reason=f"JAX {jax.__version__} has no Mosaic GPU interpreter; 0.11 has"
)

# K, D, P, dtype: wide vectors, narrow vectors, overlapping pieces, rows shorter than a warpgroup.
POOLS = [
    (8, 128, 16, "bfloat16"),
    (8, 256, 1, "float32"),
    (3, 64, 16, "bfloat16"),
    (5, 112, 8, "float16"),
    (2, 80, 64, "bfloat16"),
    (12, 96, 256, "bfloat16"),
    (1, 192, 16, "float32"),
    (1, 64, 1, "bfloat16"),
    (1, 80, 2, "float16"),
    (8, 128, 16, "float8_e4m3fn"),
]


def pools(num_kv_heads, head_dim, block_size, dtype, num_layers=2, num_blocks=5):
    shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)]


def new_tokens(pool, num_tokens):
    rng = np.random.default_rng(1)
    return [
        jnp.asarray(rng.standard_normal((num_tokens, *pool.shape[3:])), jnp.float32)
        for _ in range(2)
    ]


def bits(array):
    return np.asarray(array).view(np.uint8)


def interpreter():
    return (
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))  # pyright: ignore
        if has_interpreter
        else contextlib.nullcontext()
    )


def lower(function, *args) -> str:
    jitted = jax.jit(function, donate_argnums=(0, 1))
    return jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("pool_options", POOLS)
def test_write_lowers_for_cuda_and_aliases_both_pools(pool_options):
    k_pool, v_pool = pools(*pool_options)
    k, v = new_tokens(k_pool, 7)
    slots = jnp.zeros(7, jnp.int32)
    text = lower(write_mosaic_gpu.write, k_pool, v_pool, jnp.int32(1), k, v, slots)
    assert text.count("custom_call @mosaic_gpu_v2") == 1  # K and V in one launch
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize("pool_options", POOLS)
def test_copy_blocks_lowers_for_cuda_and_aliases_both_pools(pool_options):
    k_pool, v_pool = pools(*pool_options)
    blocks = jnp.zeros(3, jnp.int32)
    text = lower(copy_mosaic_gpu.copy_blocks, k_pool, v_pool, blocks, blocks)
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 2


@interpreted
@pytest.mark.parametrize(
    "pool_options",
    [
        (8, 128, 4, "bfloat16"),
        (3, 64, 4, "bfloat16"),
        (5, 48, 2, "float32"),
        (1, 24, 4, "float16"),
    ],
)
def test_write_puts_tokens_into_their_slots_and_drops_the_others(pool_options):
    k_pool, v_pool = pools(*pool_options)
    num_slots = k_pool.shape[1] * k_pool.shape[2]
    slots = [3, -1, num_slots - 1, num_slots, 0, 2**31 - 1, -(2**31)]
    k, v = new_tokens(k_pool, len(slots))
    with interpreter():
        written = jax.jit(write_mosaic_gpu.write)(
            k_pool, v_pool, jnp.int32(1), k, v, jnp.asarray(slots, jnp.int32)
        )
    for pool, new, got in zip((k_pool, v_pool), (k, v), written, strict=True):
        expected = np.array(pool)
        for token, slot in enumerate(slots):
            if 0 <= slot < num_slots:
                block, offset = divmod(slot, pool.shape[2])
                expected[1, block, offset] = np.asarray(new[token].astype(pool.dtype))
        np.testing.assert_array_equal(bits(got), bits(expected))


@interpreted
@pytest.mark.parametrize(
    "pool_options", [(8, 128, 6, "bfloat16"), (3, 64, 1, "bfloat16"), (1, 24, 2, "float32")]
)
def test_copy_blocks_copies_live_pairs_of_all_layers_and_drops_the_others(pool_options):
    k_pool, v_pool = pools(*pool_options)
    pairs = [(0, 4), (3, 1), (-1, 2), (0, 5), (5, 2), (3, -1)]
    src, dst = (jnp.asarray(ids, jnp.int32) for ids in zip(*pairs, strict=True))
    with interpreter():
        copied = jax.jit(copy_mosaic_gpu.copy_blocks)(k_pool, v_pool, src, dst)
    for pool, got in zip((k_pool, v_pool), copied, strict=True):
        expected = np.array(pool)
        expected[:, 4], expected[:, 1] = expected[:, 0].copy(), expected[:, 3].copy()
        np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("capability", [None, 8.0, 8.9])
def test_says_which_gpu_it_needs(capability):
    pool = pools(*POOLS[0])[0]
    for reason in (
        write_mosaic_gpu.write_unsupported_reason(pool, compute_capability=capability),
        copy_mosaic_gpu.copy_blocks_unsupported_reason(pool, compute_capability=capability),
    ):
        assert reason is not None
        assert f"compute_capability={capability}" in reason
        assert "9.0" in reason
    assert write_mosaic_gpu.write_unsupported_reason(pool, compute_capability=9.0) is None
