"""The block pools: where keys and values live, and every way to write into them.

Pure functions over `KVPool`: init, write by plan, write one token, write a prefill, copy blocks. Each
returns a new pool; under `jax.jit` with the pool donated, or in a loop's carry, nothing is copied.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from absl import logging

from paged_kv_jax import dispatch
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.plan import Plan, as_int32


@functools.partial(jax.tree_util.register_dataclass, data_fields=("k", "v"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class KVPool:
    """Keys and values of all layers, in blocks.

    One array for all layers, so that models that scan over layers and models that unroll them both
    update it in place. Slot s of layer l is `k[l, s // P, s % P]`.

    Attributes:
      k: [L, N, P, K, D].
      v: [L, N, P, K, D].
    """

    k: jax.Array
    v: jax.Array

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """P."""
        return self.k.shape[2]

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V, all layers."""
        return 2 * self.k.size * self.k.dtype.itemsize

    def k_layer(self, layer: jax.Array | int) -> jax.Array:
        """[N, P, K, D], the keys of one layer, as another library's kernel would take them."""
        return self.k[layer]

    def v_layer(self, layer: jax.Array | int) -> jax.Array:
        """[N, P, K, D], the values of one layer."""
        return self.v[layer]

    def delete(self) -> None:
        """Free the device memory now, rather than with the last reference."""
        self.k.delete()
        self.v.delete()


def init_pool(config: KVCacheConfig) -> KVPool:
    """Pools of zeros for `config`, [L, N, P, K, D] each; logs their size."""
    shape = (
        config.num_layers, config.num_blocks, config.block_size, config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    logging.info(
        "KV pool: %d layers x %d blocks x %d tokens, %.1f MB each for K and V (%s)",
        config.num_layers,
        config.num_blocks,
        config.block_size,
        config.memory_bytes / 2 / 1e6,
        config.dtype,
    )
    return KVPool(k=jnp.zeros(shape, config.dtype), v=jnp.zeros(shape, config.dtype))


def write(
    pool: KVPool,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Write this step's keys and values of one layer into the slots that the plan names.

    Args:
      pool: the pools.
      layer: int32 [], may be traced.
      k, v: [T, K, D], one row per query token of the plan; cast to the pool's dtype.
      plan: tokens with slot -1 are dropped.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the best that supports the call.

    Returns:
      The new pool.

    Raises:
      ValueError, TypeError: shapes or dtypes that cannot work.
      NotImplementedError: the implementation asked for cannot serve the call; the message says why.
    """
    if plan.block_size != pool.block_size:
        raise ValueError(
            f"the plan has block_size={plan.block_size} and the pool {pool.block_size}; must agree"
        )
    return _write_slots(pool, layer, k, v, plan.slot_mapping, implementation)


def write_token(
    pool: KVPool,
    layer: jax.Array | int,
    block: jax.Array | int,
    offset: jax.Array | int,
    *,
    k: jax.Array | None = None,
    v: jax.Array | None = None,
) -> KVPool:
    """Write one token's K, V or both into one slot of one layer.

    Args:
      pool: the pools.
      layer: int32 [], may be traced.
      block: int32 [], in [0, N); a token for any other block is dropped.
      offset: int32 [], in [0, P); likewise.
      k, v: [K, D] each, or None to leave that pool as it is.

    Returns:
      The new pool.
    """
    is_live = (jnp.asarray(block) >= 0) & (jnp.asarray(block) < pool.num_blocks)
    is_live &= (jnp.asarray(offset) >= 0) & (jnp.asarray(offset) < pool.block_size)
    block = jnp.where(is_live, block, pool.num_blocks)

    def put(into: jax.Array, name: str, token: jax.Array | None) -> jax.Array:
        if token is None:
            return into
        if token.shape != into.shape[3:]:
            raise ValueError(
                f"{name} has shape {token.shape}; it must be [K, D] = {into.shape[3:]}"
            )
        return into.at[layer, block, offset].set(token.astype(into.dtype), mode="drop")

    return KVPool(k=put(pool.k, "k", k), v=put(pool.v, "v", v))


def write_prefill(
    pool: KVPool,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    seq_len: jax.Array | int,
    block_ids: jax.Array,
) -> KVPool:
    """Copy one sequence's contiguous keys and values into its blocks, a partial last one included.

    Args:
      pool: the pools.
      layer: int32 [], may be traced.
      k, v: [T, K, D], tokens 0 to T - 1 of the sequence.
      seq_len: int32 [], may be traced: tokens of k and v that count; the rest is dropped.
      block_ids: int32 [M], the sequence's blocks in order; tokens that fall into an entry of -1, or
        past the end of it, are dropped.

    Returns:
      The new pool.
    """
    block_ids = as_int32("block_ids", block_ids, 1)
    token = jnp.arange(k.shape[0], dtype=jnp.int32)
    column = token // pool.block_size
    is_live = (token < seq_len) & (column < block_ids.shape[0])
    block = block_ids[jnp.where(is_live, column, 0)]
    slots = jnp.where(is_live & (block >= 0), block * pool.block_size + token % pool.block_size, -1)
    return _write_slots(pool, layer, k, v, slots, None)


def copy_blocks(
    pool: KVPool,
    src_blocks: jax.Array,
    dst_blocks: jax.Array,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Copy whole blocks, in all layers; all sources are read before any destination is written.

    Args:
      pool: the pools.
      src_blocks, dst_blocks: int32 [C]; a pair with an id outside [0, N) is dropped. The
        destinations must be distinct, and none may be another pair's source.
      implementation: "mosaic_gpu" or "xla"; None picks the best that supports the call.

    Returns:
      The new pool.
    """
    src_blocks = as_int32("src_blocks", src_blocks, 1)
    dst_blocks = as_int32("dst_blocks", dst_blocks, 1)
    if src_blocks.shape != dst_blocks.shape:
        raise ValueError(
            f"src_blocks has shape {src_blocks.shape} and dst_blocks {dst_blocks.shape}; must agree"
        )
    kernel = dispatch.choose("copy_blocks", implementation, pool.k)
    return KVPool(*kernel(pool.k, pool.v, src_blocks, dst_blocks))


def _write_slots(
    pool: KVPool,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    implementation: str | None,
) -> KVPool:
    expected = (slots.shape[0], *pool.k.shape[3:])
    for name, array in (("k", k), ("v", v)):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; it must be [T, K, D] = {expected}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {array.dtype}; it must be a floating-point array")
    kernel = dispatch.choose("write", implementation, pool.k)
    return KVPool(*kernel(pool.k, pool.v, layer, k, v, slots))
