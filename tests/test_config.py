"""`KVCacheConfig`: geometry, sizes, and errors that name the field."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv

FIELDS = dict(
    num_layers=3, num_kv_heads=2, head_dim=64, num_blocks=10, block_size=16, max_seqs=4,
    max_blocks_per_seq=5,
)  # fmt: skip


def test_derived_sizes():
    config = pkv.KVCacheConfig(**FIELDS)
    assert config.token_stride == 2 * 64
    assert config.block_stride == 16 * 2 * 64
    assert config.token_capacity == 160
    assert config.max_seq_len == 80
    assert config.bytes_per_token == 2 * 3 * 2 * 64 * 2  # K and V, layers, heads, dim, bfloat16
    assert config.memory_bytes == 160 * config.bytes_per_token
    assert [config.blocks_for(n) for n in (0, 1, 16, 17, 80)] == [0, 1, 1, 2, 5]


def test_memory_bytes_is_what_the_pool_takes():
    config = pkv.KVCacheConfig(**FIELDS, dtype=jnp.float32)
    pool = pkv.init_pool(config)
    assert pool.k.shape == pool.v.shape == (3, 10, 16, 2, 64)
    assert config.memory_bytes == pool.memory_bytes == pool.k.nbytes + pool.v.nbytes


def test_defaults_are_bfloat16_and_blocks_of_16():
    config = pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=1, max_seqs=1, max_blocks_per_seq=1
    )
    assert config.block_size == 16
    assert config.dtype == jnp.bfloat16


def test_config_is_hashable_and_equal_however_the_dtype_and_ints_are_spelled():
    spelled = [
        pkv.KVCacheConfig(**FIELDS, dtype=dtype) for dtype in ("float16", jnp.float16, np.float16)
    ]
    spelled.append(
        pkv.KVCacheConfig(
            **{name: np.int64(value) for name, value in FIELDS.items()}, dtype="float16"
        )
    )
    assert len(set(spelled)) == 1


def test_config_works_as_a_static_argument():
    init = jax.jit(pkv.init, static_argnums=0)
    assert init(pkv.KVCacheConfig(**FIELDS)).num_blocks == 10


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_each_size_must_be_a_positive_int(name: str, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an int of at least 1"):
        pkv.KVCacheConfig(**{**FIELDS, name: value})


@pytest.mark.parametrize(
    ("block_size", "below", "above"), [(3, 2, 4), (24, 16, 32), (255, 128, 256)]
)
def test_block_size_must_be_a_power_of_two_and_the_error_names_the_nearest(
    block_size: int, below: int, above: int
):
    with pytest.raises(ValueError, match=rf"block_size={block_size} .*such as {below} or {above}"):
        pkv.KVCacheConfig(**{**FIELDS, "block_size": block_size})


@pytest.mark.parametrize("dtype", ["int8", "float64", "no such thing", None])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=r"dtype=.*bfloat16.*float16.*float32"):
        pkv.KVCacheConfig(**FIELDS, dtype=dtype)


def test_pools_whose_slots_pass_int32_are_refused_and_the_last_that_fits_is_not():
    fits = pkv.KVCacheConfig(**{**FIELDS, "num_blocks": 2**27 - 1})
    assert fits.token_capacity == 2**31 - 16
    with pytest.raises(ValueError, match=f"num_blocks={2**27}"):
        pkv.KVCacheConfig(**{**FIELDS, "num_blocks": 2**27})


@pytest.mark.parametrize("bad", [{"max_blocks_per_seq": 2**27}, {"max_seqs": 2**30}])
def test_sequences_whose_positions_or_tables_pass_int32_are_refused(bad: dict):
    with pytest.raises(ValueError, match="max_blocks_per_seq="):
        pkv.KVCacheConfig(**{**FIELDS, **bad})


def test_for_memory_takes_the_most_blocks_that_fit():
    fields = {name: value for name, value in FIELDS.items() if name != "num_blocks"}
    per_block = pkv.KVCacheConfig(**FIELDS).memory_bytes // 10
    for spare in (0, 1, per_block - 1):
        config = pkv.KVCacheConfig.for_memory(7 * per_block + spare, **fields)
        assert config == pkv.KVCacheConfig(**{**FIELDS, "num_blocks": 7})


def test_for_memory_says_what_one_block_takes():
    fields = {name: value for name, value in FIELDS.items() if name != "num_blocks"}
    per_block = pkv.KVCacheConfig(**FIELDS).memory_bytes // 10
    with pytest.raises(ValueError, match=f"memory_bytes={per_block - 1} .*{per_block} bytes"):
        pkv.KVCacheConfig.for_memory(per_block - 1, **fields)
    with pytest.raises(ValueError, match="num_blocks"):
        pkv.KVCacheConfig.for_memory(10 * per_block, **FIELDS)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pkv.KVCacheConfig(**FIELDS).num_blocks = 3  # pyright: ignore[reportAttributeAccessIssue]
