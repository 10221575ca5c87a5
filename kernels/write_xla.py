"""KV writes and block copies as XLA scatters: every platform, any dtype."""

import jax
import jax.numpy as jnp


def write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Put each token's K and V into its slot of one layer.

    Args:
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      k, v: [T, K, D]; cast to the pools' dtype.
      slots: int32 [T], `block * P + offset`; slots outside [0, N * P) are dropped.

    Returns:
      The pools, updated in place where they are donated or carried by a loop.
    """
    num_blocks, block_size = k_pool.shape[1:3]
    # A negative index would wrap; both kinds of bad slot go past the end, where "drop" drops them.
    is_live = (slots >= 0) & (slots < num_blocks * block_size)
    blocks = jnp.where(is_live, slots // block_size, num_blocks)
    offsets = slots % block_size
    return tuple(
        pool.at[layer, blocks, offsets].set(new.astype(pool.dtype), mode="drop")
        for pool, new in ((k_pool, k), (v_pool, v))
    )


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src_blocks: jax.Array, dst_blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copy whole blocks, in all layers.

    Args:
      k_pool, v_pool: [L, N, P, K, D].
      src_blocks, dst_blocks: int32 [C]; pairs with an id outside [0, N) are dropped. All sources
        are read before any destination is written; destinations are distinct.

    Returns:
      The pools, updated in place where they are donated or carried by a loop.
    """
    num_blocks = k_pool.shape[1]
    is_live = (src_blocks >= 0) & (src_blocks < num_blocks)
    is_live &= (dst_blocks >= 0) & (dst_blocks < num_blocks)
    source = jnp.where(is_live, src_blocks, 0)
    target = jnp.where(is_live, dst_blocks, num_blocks)
    return tuple(pool.at[:, target].set(pool[:, source], mode="drop") for pool in (k_pool, v_pool))
