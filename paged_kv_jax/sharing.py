"""Sequences that share blocks, get shorter, or give up what lies behind a window.

Three operations over `BlockState` with the rules of `paged_kv_jax.allocator`: rows of a batch, -1 for
padding, all or nothing per row, result codes. Only full blocks are ever shared. Where a sequence would
be left with a partly filled block that another one refers to, it gets a block of its own, and the
operation returns which block to copy where: hand that to `copy_blocks` before the pool is next
written to, in the same compiled step. Appending then never has to look at reference counts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.plan import as_int32
from paged_kv_jax.state import BlockState, release_blocks, resolve_rows, take_blocks


class BlockCopies(NamedTuple):
    """Blocks to copy, at most one for each of B rows: `copy_blocks(pool, copies.src, copies.dst)`.

    Attributes:
      src: int32 [B], -1 where the row has nothing to copy.
      dst: int32 [B], -1 likewise; distinct, and none of them a source.
    """

    src: jax.Array
    dst: jax.Array


def fork(
    state: BlockState,
    parent_ids: jax.Array,
    child_ids: jax.Array,
    lengths: jax.Array | None = None,
) -> tuple[BlockState, jax.Array, BlockCopies]:
    """Start sequences as copies of others: full blocks are shared, a partly filled tail is copied.

    Costs O(B x M). Parallel sampling forks one parent into many rows. Beam search forks the surviving
    beams into a second set of ids, frees the first set, and swaps the two sets' roles.

    Args:
      state: the allocator's state.
      parent_ids: int32 [B], live sequences; one may stand in several rows. -1 for a padding row.
      child_ids: int32 [B], sequences that are not live, each at most once; -1 for a padding row.
      lengths: int32 [B], how many of the parent's first tokens each child starts with, at least 1;
        all of them if None.

    Returns:
      The new state; int32 [B], the number of blocks newly taken (1 where a tail is copied), or
      OUT_OF_BLOCKS (-1); INVALID_SEQ (-2), the parent is not live, or the child is out of range or
      live; DUPLICATE_SEQ (-4), an earlier row has the child; INVALID_COUNT (-5), the length is below
      1, above the parent's, or reaches back into blocks that `release_before` gave up; and the
      copies to perform.
    """
    parent_ids = as_int32("parent_ids", parent_ids, 1)
    child_ids = as_int32("child_ids", child_ids, 1)
    _check_rows("child_ids", child_ids, parent_ids)
    children = resolve_rows(state, child_ids, must_be_live=False)
    parent_in_range = (parent_ids >= 0) & (parent_ids < state.max_seqs)
    parents = jnp.where(parent_in_range, parent_ids, 0)
    parent_len = state.seq_lens[parents]
    if lengths is None:
        lengths = parent_len
    lengths = as_int32("lengths", lengths, 1)
    _check_rows("lengths", lengths, parent_ids)

    is_active = (parent_ids != -1) | (child_ids != -1)
    is_valid = parent_in_range & (parent_len > 0)
    is_valid &= (child_ids >= 0) & (state.seq_block_count[children.safe_ids] == 0)
    table = state.block_table[parents]  # [B, M]
    is_bad_length = (lengths < 1) | (lengths > parent_len)
    is_bad_length |= lengths < _released_columns(state, parents, table) * state.block_size
    code = jnp.where(is_bad_length, ResultCode.INVALID_COUNT, 0)
    code = jnp.where(is_valid, code, ResultCode.INVALID_SEQ)
    code = jnp.where(children.code < 0, children.code, code)
    served = is_active & (code >= 0)

    full = lengths // state.block_size  # columns to share; the next one, if any, is the tail
    has_tail = served & (lengths % state.block_size > 0)
    state, fresh, fits = take_blocks(state, has_tail.astype(jnp.int32), 1)
    code = jnp.where(served & ~fits, ResultCode.OUT_OF_BLOCKS, code)
    served &= fits
    copies = _copies(table, full, fresh[:, 0])
    column = jnp.arange(state.max_blocks_per_seq, dtype=jnp.int32)
    is_shared = column < full[:, None]
    child_table = jnp.where(is_shared, table, -1)
    child_table = jnp.where(column == full[:, None], fresh, child_table)

    result = jnp.where(is_active & (code < 0), code, (fresh[:, 0] >= 0).astype(jnp.int32))
    child = jnp.where(served, children.safe_ids, state.max_seqs)
    gains = served[:, None] & is_shared & (table >= 0)
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[child].set(child_table, mode="drop"),
        seq_lens=state.seq_lens.at[child].set(lengths, mode="drop"),
        seq_block_count=state.seq_block_count.at[child].set(
            -(-lengths // state.block_size), mode="drop"
        ),
        ref_count=state.ref_count.at[jnp.where(gains, table, state.num_blocks)].add(1, mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    return state, result, copies


def truncate(
    state: BlockState, seq_ids: jax.Array, new_lens: jax.Array
) -> tuple[BlockState, jax.Array, BlockCopies]:
    """Shorten sequences: the blocks past the new length go back. Rolls back rejected draft tokens.

    Where the new length ends inside a block that others refer to, the sequence gets a copy of it.
    Costs O(B x M).

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
      new_lens: int32 [B], tokens that stay; 0 ends the sequence, as `free` does.

    Returns:
      The new state; int32 [B], the number of blocks that went back to the free list, or
      OUT_OF_BLOCKS (-1), no block for the copy; INVALID_SEQ (-2), out of range or not live;
      DUPLICATE_SEQ (-4); INVALID_COUNT (-5), the length is negative, above the sequence's, or
      reaches back into blocks that `release_before` gave up; and the copies to perform.
    """
    rows = resolve_rows(state, seq_ids, must_be_live=True)
    new_lens = as_int32("new_lens", new_lens, 1)
    _check_rows("new_lens", new_lens, rows.code)
    table = state.block_table[rows.safe_ids]  # [B, M]
    released = _released_columns(state, rows.safe_ids, table)
    is_bad_length = (new_lens < 0) | (new_lens > state.seq_lens[rows.safe_ids])
    is_bad_length |= (new_lens > 0) & (new_lens < released * state.block_size)
    code = jnp.where(is_bad_length, ResultCode.INVALID_COUNT, 0)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)

    full = new_lens // state.block_size
    has_tail = served & (new_lens % state.block_size > 0)
    tail = _entry(table, full)
    is_shared = state.ref_count[jnp.where(has_tail, tail, 0)] > 1
    state, fresh, fits = take_blocks(state, (has_tail & is_shared).astype(jnp.int32), 1)
    code = jnp.where(served & ~fits, ResultCode.OUT_OF_BLOCKS, code)
    served &= fits
    copies = _copies(table, full, fresh[:, 0])
    column = jnp.arange(state.max_blocks_per_seq, dtype=jnp.int32)
    stays = column < jnp.where(has_tail, full + 1, full)[:, None]
    is_replaced = (column == full[:, None]) & (fresh >= 0)
    goes = served[:, None] & (table >= 0) & (~stays | is_replaced)
    state, went_back = release_blocks(state, jnp.where(goes, table, state.num_blocks))

    new_table = jnp.where(is_replaced, fresh, jnp.where(stays, table, -1))
    result = jnp.sum(went_back, axis=1, dtype=jnp.int32)
    result = jnp.where(rows.is_active & (code < 0), code, result)
    seq = jnp.where(served, rows.safe_ids, state.max_seqs)
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[seq].set(new_table, mode="drop"),
        seq_lens=state.seq_lens.at[seq].set(new_lens, mode="drop"),
        seq_block_count=state.seq_block_count.at[seq].set(
            -(-new_lens // state.block_size), mode="drop"
        ),
        errors=state.errors | sticky_bits(result),
    )
    return state, result, copies


def release_before(
    state: BlockState, seq_ids: jax.Array, positions: jax.Array
) -> tuple[BlockState, jax.Array]:
    """Give back the blocks that lie wholly behind a position; the sequence stays as long as it is.

    For layers with a sliding window w: a query at position p sees keys p - w + 1 and later, so
    `release_before(state, seq_ids, next_position - w + 1)` keeps what is still to be seen. The table
    holds -1 in the columns given up, in the same step in which their blocks go back. Costs O(B x M).

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
      positions: int32 [B], at most the sequence's length; nothing lies behind 0 or less.

    Returns:
      The new state, and int32 [B]: the number of blocks that went back to the free list, or
      INVALID_SEQ (-2), out of range or not live; DUPLICATE_SEQ (-4); INVALID_COUNT (-5), the
      position is past the sequence's end.
    """
    rows = resolve_rows(state, seq_ids, must_be_live=True)
    positions = as_int32("positions", positions, 1)
    _check_rows("positions", positions, rows.code)
    is_past_end = positions > state.seq_lens[rows.safe_ids]
    code = jnp.where(is_past_end, ResultCode.INVALID_COUNT, 0)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)

    table = state.block_table[rows.safe_ids]
    column = jnp.arange(state.max_blocks_per_seq, dtype=jnp.int32)
    goes = served[:, None] & (column < (positions // state.block_size)[:, None]) & (table >= 0)
    state, went_back = release_blocks(state, jnp.where(goes, table, state.num_blocks))
    result = jnp.sum(went_back, axis=1, dtype=jnp.int32)
    result = jnp.where(rows.is_active & (code < 0), code, result)
    seq = jnp.where(served, rows.safe_ids, state.max_seqs)
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[seq].set(jnp.where(goes, -1, table), mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    return state, result


def _released_columns(state: BlockState, safe_ids: jax.Array, table: jax.Array) -> jax.Array:
    """int32 [B]: leading columns of each row whose blocks `release_before` gave back."""
    return state.seq_block_count[safe_ids] - jnp.sum(table >= 0, axis=1, dtype=jnp.int32)


def _copies(table: jax.Array, column: jax.Array, fresh: jax.Array) -> BlockCopies:
    """Copy each row's block in `column` [B] into the block `fresh` [B] it got, if it got one."""
    return BlockCopies(src=jnp.where(fresh >= 0, _entry(table, column), -1), dst=fresh)


def _entry(table: jax.Array, column: jax.Array) -> jax.Array:
    """int32 [B]: the entry of each row of `table` [B, M] in its `column` [B]; -1 outside the table."""
    is_inside = (column >= 0) & (column < table.shape[1])
    entry = jnp.take_along_axis(table, jnp.where(is_inside, column, 0)[:, None], axis=1)[:, 0]
    return jnp.where(is_inside, entry, -1)


def _check_rows(name: str, array: jax.Array, rows: jax.Array) -> None:
    if array.shape != rows.shape:
        raise ValueError(
            f"{name} has shape {array.shape}; it must have one entry per row: {rows.shape}"
        )
