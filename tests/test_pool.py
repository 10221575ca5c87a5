"""Writes and copies against numpy assignments; the whole pool's bytes are compared every time."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import paged_kv_jax as pkv

L, N, P, K, D = 2, 6, 4, 2, 8
DTYPES = ("float32", "bfloat16", "float16")


def numpy_pools(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal((L, N, P, K, D), np.float32).astype(jnp.dtype(dtype)) for _ in "kv"
    )


def device_pool(pools: tuple[np.ndarray, np.ndarray]) -> pkv.KVPool:
    return pkv.KVPool(*map(jnp.asarray, pools))


def tokens(count: int, seed: int = 1, dtype="float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal((count, K, D), np.float32).astype(jnp.dtype(dtype)) for _ in "kv"
    )


def assert_pool(pool: pkv.KVPool, k: np.ndarray, v: np.ndarray) -> None:
    assert pool.k.dtype == k.dtype
    assert np.asarray(pool.k).tobytes() == k.tobytes(), "the K pool differs"
    assert np.asarray(pool.v).tobytes() == v.tobytes(), "the V pool differs"


def plan_of(slots: list[int], block_size: int = P) -> pkv.Plan:
    """A plan that writes token t to `slots[t]`; `write` reads nothing else of it."""
    count = len(slots)
    plan = pkv.plan_from_tables(
        jnp.zeros((count, 1), jnp.int32), jnp.ones(count, jnp.int32), 1, block_size=block_size
    )
    return jax.tree.unflatten(
        jax.tree.structure(plan),
        [
            jnp.array(slots, jnp.int32) if leaf is plan.slot_mapping else leaf
            for leaf in jax.tree.leaves(plan)
        ],
    )


def test_init_pool_is_zeros_of_the_configs_shape():
    config = pkv.KVCacheConfig(
        num_layers=L, num_kv_heads=K, head_dim=D, num_blocks=N, block_size=P, max_seqs=1,
        max_blocks_per_seq=1,
    )  # fmt: skip
    pool = pkv.init_pool(config)
    assert_pool(pool, *2 * (np.zeros((L, N, P, K, D), ml_dtypes.bfloat16),))
    assert (pool.num_blocks, pool.block_size) == (N, P)
    assert pool.memory_bytes == config.memory_bytes == 2 * L * N * P * K * D * 2


@pytest.mark.parametrize("layer", range(L))
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_puts_each_token_into_its_slot(dtype: str, layer: int):
    pools = numpy_pools(dtype)
    new = tokens(5, dtype=dtype)
    slots = [23, 0, 7, 12, 13]
    write = jax.jit(pkv.write)  # the layer is traced
    pool = write(device_pool(pools), layer, *map(jnp.asarray, new), plan_of(slots))
    for array, values in zip(pools, new, strict=True):
        for token, slot in enumerate(slots):
            array[layer, slot // P, slot % P] = values[token]
    assert_pool(pool, *pools)


@pytest.mark.parametrize("slot", [-1, -2, -24, N * P, N * P + 3, 2**31 - 1, -(2**31)])
def test_write_drops_slots_outside_the_pool(slot: int):
    pools = numpy_pools()
    new = tokens(3)
    pool = pkv.write(device_pool(pools), 1, *map(jnp.asarray, new), plan_of([slot, 9, slot]))
    for array, values in zip(pools, new, strict=True):
        array[1, 9 // P, 9 % P] = values[1]
    assert_pool(pool, *pools)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_write_casts_to_the_pools_dtype(dtype: str, given: str):
    pools = numpy_pools(dtype)
    new = tokens(1, dtype=given)
    pool = pkv.write(device_pool(pools), 0, *map(jnp.asarray, new), plan_of([5]))
    for array, values in zip(pools, new, strict=True):
        array[0, 1, 1] = values[0].astype(jnp.dtype(dtype))
    assert_pool(pool, *pools)


def test_write_in_a_scan_over_layers_equals_writes_layer_by_layer():
    pools = numpy_pools()
    new = [tokens(3, seed) for seed in range(L)]
    k, v = (jnp.stack([layer[i] for layer in new]) for i in (0, 1))
    plan = plan_of([1, 22, 14])

    @jax.jit
    def write_all(pool):
        def body(pool, layer_and_tokens):
            return pkv.write(pool, *layer_and_tokens, plan), None

        return jax.lax.scan(body, pool, (jnp.arange(L), k, v))[0]

    one_by_one = device_pool(pools)
    for layer in range(L):
        one_by_one = pkv.write(one_by_one, layer, k[layer], v[layer], plan)
    assert_pool(write_all(device_pool(pools)), *map(np.asarray, (one_by_one.k, one_by_one.v)))


@pytest.mark.parametrize("which", ["k", "v", "kv"])
def test_write_token_writes_k_v_or_both_into_one_slot(which: str):
    pools = dict(zip("kv", numpy_pools("bfloat16"), strict=True))
    new = {name: values[0] for name, values in zip("kv", tokens(1), strict=True) if name in which}
    pool = pkv.write_token(
        device_pool(tuple(pools.values())), 1, 4, 2, **{n: jnp.asarray(x) for n, x in new.items()}
    )
    for name, values in new.items():
        pools[name][1, 4, 2] = values.astype(ml_dtypes.bfloat16)
    assert_pool(pool, **pools)


@pytest.mark.parametrize(("block", "offset"), [(-1, 0), (N, 0), (0, -1), (0, P), (2**31 - 1, 1)])
def test_write_token_drops_what_is_no_slot(block: int, offset: int):
    pools = numpy_pools()
    k, v = (jnp.asarray(values[0]) for values in tokens(1))
    write_token = jax.jit(pkv.write_token)
    pool = write_token(device_pool(pools), 0, jnp.int32(block), jnp.int32(offset), k=k, v=v)
    assert_pool(pool, *pools)


@pytest.mark.parametrize("seq_len", [0, 1, 4, 9, 11])
def test_write_prefill_copies_a_contiguous_sequence_into_its_blocks(seq_len: int):
    pools = numpy_pools()
    new = tokens(11)
    block_ids = [5, 0, 3, -1]
    prefill = jax.jit(pkv.write_prefill)  # the length is traced
    pool = prefill(
        device_pool(pools), 1, *map(jnp.asarray, new), seq_len, jnp.array(block_ids, jnp.int32)
    )
    for array, values in zip(pools, new, strict=True):
        for position in range(seq_len):
            array[1, block_ids[position // P], position % P] = values[position]
    assert_pool(pool, *pools)


@pytest.mark.parametrize("block_ids", [[2], [2, -1, -1], [2, N, -7]])
def test_write_prefill_drops_tokens_that_have_no_block(block_ids: list[int]):
    pools = numpy_pools()
    new = tokens(11)
    pool = pkv.write_prefill(
        device_pool(pools), 0, *map(jnp.asarray, new), 11, jnp.array(block_ids, jnp.int32)
    )
    for array, values in zip(pools, new, strict=True):
        array[0, 2] = values[:P]
    assert_pool(pool, *pools)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_copies_whole_blocks_in_all_layers(dtype: str):
    pools = numpy_pools(dtype)
    source, target = [0, 5, 0], [3, 1, 4]
    copy = jax.jit(pkv.copy_blocks)
    pool = copy(device_pool(pools), jnp.array(source), jnp.array(target))
    for array in pools:
        array[:, target] = array[:, source]
    assert_pool(pool, *pools)


@pytest.mark.parametrize("pair", [(-1, 2), (2, -1), (N, 2), (2, N), (-1, -1), (2, 2**31 - 1)])
def test_copy_blocks_drops_pairs_outside_the_pool(pair: tuple[int, int]):
    pools = numpy_pools()
    pool = pkv.copy_blocks(device_pool(pools), jnp.array([pair[0], 4]), jnp.array([pair[1], 0]))
    for array in pools:
        array[:, 0] = array[:, 4]
    assert_pool(pool, *pools)


def test_layer_views_are_the_layers():
    pools = numpy_pools()
    pool = device_pool(pools)
    np.testing.assert_array_equal(pool.k_layer(1), pools[0][1])
    np.testing.assert_array_equal(jax.jit(pkv.KVPool.v_layer)(pool, 0), pools[1][0])


def test_delete_frees_the_memory_now():
    pool = device_pool(numpy_pools())
    pool.delete()
    assert pool.k.is_deleted()
    assert pool.v.is_deleted()


def test_mistakes_are_refused_by_name_and_value():
    pool = device_pool(numpy_pools())
    k, v = map(jnp.asarray, tokens(2))
    with pytest.raises(ValueError, match=r"k has shape \(2, 2, 8\); .* \(3, 2, 8\)"):
        pkv.write(pool, 0, k, v, plan_of([1, 2, 3]))
    with pytest.raises(ValueError, match=r"v has shape \(2, 8, 2\)"):
        pkv.write(pool, 0, k, v.swapaxes(1, 2), plan_of([1, 2]))
    with pytest.raises(TypeError, match="v has dtype int32"):
        pkv.write(pool, 0, k, v.astype(jnp.int32), plan_of([1, 2]))
    with pytest.raises(ValueError, match="block_size=8 and the pool 4"):
        pkv.write(pool, 0, k, v, plan_of([1, 2], block_size=8))
    with pytest.raises(ValueError, match=r"implementation='fastest' is not one of .*'xla'"):
        pkv.write(pool, 0, k, v, plan_of([1, 2]), implementation="fastest")
    with pytest.raises(ValueError, match=r"src_blocks has shape \(1,\) and dst_blocks \(2,\)"):
        pkv.copy_blocks(pool, jnp.array([1]), jnp.array([1, 2]))
    with pytest.raises(TypeError, match="dst_blocks has dtype float32"):
        pkv.copy_blocks(pool, jnp.array([1]), jnp.array([1.0]))
    with pytest.raises(ValueError, match=r"v has shape \(8,\)"):
        pkv.write_token(pool, 0, 0, 0, v=jnp.ones(8))
