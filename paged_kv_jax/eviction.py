"""Giving up blocks that a `PrefixIndex` holds: to make room, or because the weights changed.

An eviction sorts all N blocks, and is therefore done for a batch of blocks at a time, and only when
too few are free: for each block it gives back it costs O(log N). Least recently used means found or
committed least recently; of blocks used at the same time the tails go before the heads.
"""

import dataclasses

import jax
import jax.numpy as jnp

from paged_kv_jax.prefix_table import PrefixIndex, drop_orphans
from paged_kv_jax.state import BlockState


def make_room(
    index: PrefixIndex,
    state: BlockState,
    needed: jax.Array | int,
    *,
    batch: int | None = None,
) -> tuple[PrefixIndex, BlockState]:
    """Evict what rows need beyond the free blocks, for as many rows, in order, as can have it.

    To be called before an `append`, `fork` or `truncate`, with the blocks that each row may take. Does
    nothing while enough blocks are free: blocks that the index never held are handed out first.

    Args:
      index: the index.
      state: the allocator's state.
      needed: int32 [] or [B], not negative.
      batch: the fewest blocks to evict at once (static), so that the sort over all N blocks that an
        eviction takes is spread over that many; N // 64 if None, at least 1.

    Returns:
      The new index and state.
    """
    batch = max(1, index.num_blocks // 64) if batch is None else batch
    total = jnp.cumsum(jnp.atleast_1d(jnp.asarray(needed, jnp.int32)), dtype=jnp.int32)

    # A loop that runs once or not at all: unlike a conditional, it updates its arrays in place.
    def make(carry):
        _, table, slot, free_list, free_top, ref_count = carry
        full = dataclasses.replace(index, table=table, slot=slot)
        used = dataclasses.replace(
            state, free_list=free_list, free_top=free_top, ref_count=ref_count
        )
        # Nothing is evicted for a row that could not be served even then.
        available = free_top + jnp.sum(idle_blocks(full, used), dtype=jnp.int32)
        missing = jnp.max(jnp.where(total <= available, total, 0)) - free_top
        full, used, _ = evict(full, used, jnp.where(missing > 0, jnp.maximum(missing, batch), 0))
        return jnp.bool(False), full.table, full.slot, used.free_list, used.free_top, used.ref_count

    is_short = total[-1] > state.free_top
    _, table, slot, free_list, free_top, ref_count = jax.lax.while_loop(
        lambda carry: carry[0],
        make,
        (is_short, index.table, index.slot, state.free_list, state.free_top, state.ref_count),
    )
    index = dataclasses.replace(index, table=table, slot=slot)
    state = dataclasses.replace(state, free_list=free_list, free_top=free_top, ref_count=ref_count)
    return index, state


def evict(
    index: PrefixIndex, state: BlockState, num_blocks: jax.Array | int
) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Give back blocks that only the index refers to: the least recently used, and tails before heads.

    Args:
      index: the index.
      state: the allocator's state.
      num_blocks: int32 [], how many; all there are if there are fewer.

    Returns:
      The new index and state, and int32 [], the number of blocks that went back to the free list.
    """
    is_idle = idle_blocks(index, state)
    block = jnp.arange(index.num_blocks, dtype=jnp.int32)
    youth = ~(index.clock - index.last_used)  # uint32, 0 for the longest unused
    *_, order = jax.lax.sort((youth, -index.depth, block), num_keys=3, is_stable=False)
    idle_in_order = is_idle[order]
    rank = jnp.cumsum(idle_in_order, dtype=jnp.int32)
    goes = idle_in_order & (rank <= jnp.asarray(num_blocks, jnp.int32))
    return _drop(index, state, order, goes)


def forget(index: PrefixIndex, state: BlockState) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Drop everything from the index: nothing that is written now will be found. For new weights.

    Blocks of live sequences stay theirs.

    Args:
      index: the index.
      state: the allocator's state.

    Returns:
      The new index and state, and int32 [], the number of blocks that went back to the free list.
    """
    return _drop(index, state, jnp.arange(index.num_blocks, dtype=jnp.int32), index.is_held)


def idle_blocks(index: PrefixIndex, state: BlockState) -> jax.Array:
    """bool [N]: the blocks that only the index refers to."""
    return index.is_held & (state.ref_count == 1)


def settle(
    index: PrefixIndex, state: BlockState, table: jax.Array, slot: jax.Array, order: jax.Array
) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Give up the references to blocks that `table` and `slot` leave out, and what hangs below them.

    Args:
      index: the index as it was.
      state: the allocator's state.
      table, slot: the index's new ones.
      order: int32 [N], all blocks, in the order in which those freed go to the free list.

    Returns:
      The new index and state, and int32 [], the number of blocks that went back to the free list.
    """
    num_blocks = index.num_blocks
    table, slot = drop_orphans(table, slot, index.parent, order)
    is_dropped = index.is_held & (slot < 0)
    ref_count = state.ref_count - is_dropped.astype(jnp.int32)
    is_freed = (is_dropped & (ref_count == 0))[order]
    target = state.free_top + jnp.cumsum(is_freed, dtype=jnp.int32) - 1
    free_list = state.free_list.at[jnp.where(is_freed, target, num_blocks)].set(order, mode="drop")
    num_freed = jnp.sum(is_freed, dtype=jnp.int32)
    state = dataclasses.replace(
        state, ref_count=ref_count, free_list=free_list, free_top=state.free_top + num_freed
    )
    return dataclasses.replace(index, table=table, slot=slot), state, num_freed


def _drop(
    index: PrefixIndex, state: BlockState, order: jax.Array, goes: jax.Array
) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Drop those of the blocks `order` [N] that `goes` [N] says, and what hangs below them."""
    at = jnp.where(goes, index.slot[order], index.table.shape[0])
    table = index.table.at[at].set(-1, mode="drop")
    slot = index.slot.at[jnp.where(goes, order, index.num_blocks)].set(-1, mode="drop")
    return settle(index, state, table, slot, order)
