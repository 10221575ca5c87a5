"""A pool of another size: blocks in use move to the front, tables follow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paged_kv_jax.eviction import settle
from paged_kv_jax.pool import KVPool
from paged_kv_jax.prefix_table import PrefixIndex, empty_index, place
from paged_kv_jax.state import BlockState


def resize(
    state: BlockState,
    pool: KVPool,
    num_blocks: int,
    index: PrefixIndex | None = None,
) -> tuple[BlockState, KVPool, PrefixIndex | None]:
    """The same sequences in a pool of `num_blocks` blocks, in the first of them and in their order.

    One gather of the pool, during which both pools exist. Shapes change, so that compiled steps
    compile again. Not for use inside `jax.jit`; `compact` is.

    Args:
      state: the allocator's state.
      pool: the pools.
      num_blocks: blocks of the new pools.
      index: the prefix index over the same pool, if there is one.

    Returns:
      The new state, pools, and index (None if none was given).

    Raises:
      ValueError: more blocks are in use than would be left.
    """
    used = state.num_blocks - int(state.free_top)
    if num_blocks < max(used, 1):
        raise ValueError(
            f"num_blocks={num_blocks} is too small: {used} blocks are in use; free or swap out "
            "sequences, or evict from the index, first"
        )
    return _move(state, pool, index, num_blocks)


def compact(
    state: BlockState, pool: KVPool, index: PrefixIndex | None = None
) -> tuple[BlockState, KVPool, PrefixIndex | None]:
    """As `resize`, in a pool of the same size: blocks in use come first. Jittable.

    Args:
      state: the allocator's state.
      pool: the pools.
      index: the prefix index over the same pool, if there is one.

    Returns:
      The new state, pools, and index (None if none was given).
    """
    return _move(state, pool, index, state.num_blocks)


@functools.partial(jax.jit, static_argnames="num_blocks")
def _move(
    state: BlockState, pool: KVPool, index: PrefixIndex | None, num_blocks: int
) -> tuple[BlockState, KVPool, PrefixIndex | None]:
    if index is not None and num_blocks > state.num_blocks:
        index, state = _grow_table(index, state, num_blocks)
    is_used = state.ref_count > 0
    new_id = jnp.where(is_used, jnp.cumsum(is_used, dtype=jnp.int32) - 1, -1)
    num_used = jnp.sum(is_used, dtype=jnp.int32)
    source = jnp.zeros(num_blocks, jnp.int32)  # of each new block; any for a free one
    source = source.at[jnp.where(is_used, new_id, num_blocks)].set(
        jnp.arange(state.num_blocks, dtype=jnp.int32), mode="drop"
    )
    is_filled = jnp.arange(num_blocks, dtype=jnp.int32) < num_used

    def moved(per_block: jax.Array, fill: int = 0) -> jax.Array:
        wide = is_filled.reshape(-1, *[1] * (per_block.ndim - 1))
        return jnp.where(wide, per_block[source], jnp.asarray(fill, per_block.dtype))

    def renamed(blocks: jax.Array) -> jax.Array:
        return jnp.where(blocks >= 0, new_id[jnp.maximum(blocks, 0)], -1)

    state = dataclasses.replace(
        state,
        block_table=renamed(state.block_table),
        ref_count=moved(state.ref_count),
        free_list=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        free_top=num_blocks - num_used,
    )
    pool = KVPool(k=pool.k[:, source], v=pool.v[:, source])
    if index is not None:
        index = dataclasses.replace(
            index,
            table=renamed(index.table),
            slot=moved(index.slot, -1),
            parent=renamed(moved(index.parent, -1)),
            **{
                name: moved(getattr(index, name))
                for name in ("hashes", "tokens", "salt", "depth", "last_used")
            },
        )
    return state, pool, index


def _grow_table(
    index: PrefixIndex, state: BlockState, num_blocks: int
) -> tuple[PrefixIndex, BlockState]:
    """The index with a table as large as `num_blocks` blocks want."""
    table = empty_index(num_blocks, index.block_size).table
    blocks = jnp.arange(index.num_blocks, dtype=jnp.int32)
    table, found, at = place(
        dataclasses.replace(index, table=table),
        blocks, index.hashes, index.is_held, jnp.zeros_like(index.is_held),
    )  # fmt: skip
    slot = jnp.where(found == blocks, at, -1)
    index, state, _ = settle(index, state, table, slot, blocks)
    return index, state
