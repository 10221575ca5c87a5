"""KV writes and block copies on a GPU: every shape, dropped slots, huge pools, nothing else touched."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_kv_jax.kernels import copy_mosaic_gpu, triton, write_mosaic_gpu, write_xla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

WRITERS = {"mosaic_gpu": write_mosaic_gpu, "triton": triton, "xla": write_xla}
COPIERS = {"mosaic_gpu": copy_mosaic_gpu, "xla": write_xla}
HUGE = (1, 70_000, 16, 8, 256)  # 2.3e9 elements: offsets need more than 31 bits

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
]


@pytest.fixture(params=WRITERS)
def writer(request) -> types.ModuleType:
    return WRITERS[request.param]


@pytest.fixture(params=COPIERS)
def copier(request) -> types.ModuleType:
    return COPIERS[request.param]


def random_pools(num_kv_heads, head_dim, block_size, dtype, num_layers=3, num_blocks=40):
    rng = np.random.default_rng(0)
    shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    return [rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for _ in range(2)]


def assert_same_bytes(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))


def written(pools, layer, k, v, slots):
    """What a write should leave, one token at a time."""
    pools = [pool.copy() for pool in pools]
    num_blocks, block_size = pools[0].shape[1:3]
    for token, slot in enumerate(slots):
        if 0 <= slot < num_blocks * block_size:
            for pool, new in zip(pools, (k, v), strict=True):
                pool[layer, slot // block_size, slot % block_size] = new[token].astype(pool.dtype)
    return pools


def jitted(writer):
    """Compiled on its own: its cache counts only its caller's compilations."""
    return jax.jit(lambda *args: writer.write(*args), donate_argnums=(0, 1))


@pytest.mark.parametrize("pool_options", POOLS, ids=str)
def test_write_touches_its_slots_and_nothing_else(writer, pool_options):
    rng = np.random.default_rng(1)
    pools = random_pools(*pool_options)
    num_slots = pools[0].shape[1] * pools[0].shape[2]
    slots = rng.permutation(num_slots)[: min(200, num_slots)].astype(np.int32)
    slots[::5] = -1
    slots[1::7] = rng.choice([num_slots, -7, 2**31 - 1, -(2**31)], slots[1::7].size)
    k, v = rng.standard_normal((2, slots.size, *pools[0].shape[3:]), np.float32)
    write = jitted(writer)
    for layer in (1, 2):  # the layer is data
        got = write(*map(jnp.asarray, (*pools, np.int32(layer), k, v, slots)))
        assert_same_bytes(got, written(pools, layer, k, v, slots))
    assert write._cache_size() == 1


def test_a_small_batch_after_a_big_one_leaves_the_rest_alone(writer):
    rng = np.random.default_rng(2)
    pools = random_pools(8, 128, 16, "bfloat16")
    k, v = rng.standard_normal((2, 300, 8, 128), np.float32)
    big = rng.permutation(40 * 16)[:300].astype(np.int32)
    small = np.full(300, -1, np.int32)
    small[[0, 17, 299]] = [639, 0, 5]
    write = jitted(writer)
    state = list(map(jnp.asarray, pools))
    for slots in (big, small):
        state = write(*state, jnp.int32(0), *map(jnp.asarray, (k, v, slots)))
        pools = written(pools, 0, k, v, slots)
        assert_same_bytes(state, pools)
    assert write._cache_size() == 1


def test_write_reaches_the_top_of_a_huge_pool(writer):
    rng = np.random.default_rng(3)
    num_blocks, block_size = HUGE[1:3]
    top = num_blocks * block_size - 1
    slots = jnp.asarray([top, 3, top - 5 * block_size, -1, top + 1, top // 2], jnp.int32)
    k, v = (jnp.asarray(rng.standard_normal((6, *HUGE[3:])), jnp.bfloat16) for _ in range(2))
    got = jitted(writer)(*huge_pools(), jnp.int32(0), k, v, slots)
    for pool, new in zip(got, (k, v), strict=True):
        for token in (0, 1, 2, 5):
            block, offset = divmod(int(slots[token]), block_size)
            np.testing.assert_array_equal(pool[0, block, offset], new[token])
        touched = np.flatnonzero(np.any(pool != 0, axis=(0, 2, 3, 4)))
        live = sorted({int(slots[token]) // block_size for token in (0, 1, 2, 5)})
        assert touched.tolist() == live


def huge_pools():
    return jnp.zeros(HUGE, jnp.bfloat16), jnp.zeros(HUGE, jnp.bfloat16)


@pytest.mark.parametrize("pool_options", POOLS, ids=str)
def test_copy_blocks_touches_its_destinations_and_nothing_else(copier, pool_options):
    rng = np.random.default_rng(4)
    pools = random_pools(*pool_options)
    ids = rng.permutation(40).astype(np.int32)
    src, dst = ids[:20].copy(), ids[20:].copy()
    src[3], src[4], dst[5], dst[6] = -1, 40, -1, 2**31 - 1
    got = jax.jit(copier.copy_blocks, donate_argnums=(0, 1))(*map(jnp.asarray, (*pools, src, dst)))
    expected = [pool.copy() for pool in pools]
    for source, target in zip(src, dst, strict=True):
        if 0 <= source < 40 and 0 <= target < 40:
            for pool, old in zip(expected, pools, strict=True):
                pool[:, target] = old[:, source]
    assert_same_bytes(got, expected)


def test_copy_blocks_reaches_the_top_of_a_huge_pool(copier):
    top = HUGE[1] - 1
    value = jnp.asarray(np.random.default_rng(5).standard_normal(HUGE[2:]), jnp.bfloat16)
    k_pool, v_pool = (pool.at[0, top - 1].set(value) for pool in huge_pools())
    pairs = jnp.asarray([top - 1, 0], jnp.int32), jnp.asarray([top, 7], jnp.int32)
    copied = jax.jit(copier.copy_blocks, donate_argnums=(0, 1))(k_pool, v_pool, *pairs)
    for pool in copied:
        np.testing.assert_array_equal(pool[0, top], value)
        assert np.flatnonzero(np.any(pool != 0, axis=(0, 2, 3, 4))).tolist() == [top - 1, top]


def test_a_loop_of_writes_and_copies_needs_no_second_pool():
    shape = (4, 2048, 16, 8, 128)
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    new = jax.ShapeDtypeStruct((32, 8, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)

    def loop(k_pool, v_pool, k, v, slots):
        def step(pools, layer):
            pools = write_mosaic_gpu.write(*pools, layer, k, v, slots)
            return copy_mosaic_gpu.copy_blocks(*pools, slots, slots + 100), None

        return jax.lax.scan(step, (k_pool, v_pool), jnp.arange(4, dtype=jnp.int32))[0]

    compiled = jax.jit(loop, donate_argnums=(0, 1)).lower(pool, pool, new, new, ids).compile()
    memory = compiled.memory_analysis()
    pool_bytes = 2 * np.prod(shape)
    assert memory.temp_size_in_bytes < pool_bytes / 10
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
