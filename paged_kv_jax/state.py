"""`BlockState`, who owns which block, and the steps that every operation over it is made of.

The state is an immutable pytree; operations are pure functions that return a new one. What they share
is here: checking the rows' seq_ids, taking blocks off the free list, and dropping references. The
operations themselves are in `allocator` and `sharing`; `prefix` and `swap` build on both.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.errors import ResultCode
from paged_kv_jax.plan import as_int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "block_table", "seq_lens", "seq_block_count", "free_list", "free_top", "ref_count", "errors",
    ),
    meta_fields=("block_size",),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class BlockState:
    """Who owns which block, for S sequences over N blocks. A pytree of int32 arrays.

    Always holds (`check_invariants` tests it):
      * every block is either on the free list, once, or referenced, never both;
      * `ref_count[n]` is the number of block-table entries that hold block n, and one more where a
        `PrefixIndex` holds it;
      * row s of the table holds blocks in columns [0, seq_block_count[s]) and -1 beyond; the first
        of those columns are -1 too where `release_before` gave their blocks back;
      * `seq_block_count[s]` columns are exactly what `seq_lens[s]` tokens need;
      * a block that a sequence may still write into, its partly filled tail, has one reference.

    Attributes:
      block_table: int32 [S, M], blocks of each sequence in order; -1 for "no block".
      seq_lens: int32 [S], tokens of each sequence; 0 for a sequence that is not live.
      seq_block_count: int32 [S], columns of the table that each sequence uses; 0 if it is not live.
      free_list: int32 [N], a stack; entries [0, free_top) are the free blocks.
      free_top: int32 [], number of free blocks.
      ref_count: int32 [N], references to each block.
      errors: int32 [], sticky word; see `paged_kv_jax.errors`.
      block_size: P, token slots per block (static).
    """

    block_table: jax.Array
    seq_lens: jax.Array
    seq_block_count: jax.Array
    free_list: jax.Array
    free_top: jax.Array
    ref_count: jax.Array
    errors: jax.Array
    block_size: int

    @property
    def max_seqs(self) -> int:
        """S, rows of the block table."""
        return self.block_table.shape[-2]

    @property
    def max_blocks_per_seq(self) -> int:
        """M, columns of the block table."""
        return self.block_table.shape[-1]

    @property
    def num_blocks(self) -> int:
        """N, blocks of the pool."""
        return self.ref_count.shape[-1]


def check_invariants(state: BlockState, held: jax.Array | None = None) -> list[str]:
    """Which invariants of `BlockState` are broken, in words; empty if none. For the host only.

    O(N + S * M): for tests, notebooks and debugging, not for a step.

    Args:
      state: the allocator's state.
      held: bool [N], the blocks that a `PrefixIndex` holds (`index.is_held`), where there is one.
    """
    table, lens, count, free_list, ref_count = (
        np.asarray(getattr(state, name))
        for name in ("block_table", "seq_lens", "seq_block_count", "free_list", "ref_count")
    )
    num_blocks, free_top = state.num_blocks, int(state.free_top)
    if not 0 <= free_top <= num_blocks:
        return [f"free_top={free_top} is outside [0, {num_blocks}]"]
    broken = []
    free_blocks = free_list[:free_top]
    if np.any((free_blocks < 0) | (free_blocks >= num_blocks)):
        return ["the free list holds an id that is no block"]
    if np.any((table < -1) | (table >= num_blocks)):
        return ["the block table holds an id that is no block"]
    if len(np.unique(free_blocks)) != free_top:
        broken.append("a block stands on the free list twice")
    references = np.bincount(table[table >= 0], minlength=num_blocks)
    if held is not None:
        references = references + np.asarray(held)
    if not np.array_equal(references, ref_count):
        wrong = np.flatnonzero(references != ref_count)
        broken.append(f"ref_count differs from the references there are for blocks {wrong[:8]}")
    if np.any(references[free_blocks] > 0):
        broken.append("a block is both free and referenced")
    if free_top + np.count_nonzero(references) != num_blocks:
        broken.append("a block is neither free nor referenced")
    if np.any((lens < 0) | (count < 0) | (count > state.max_blocks_per_seq)):
        broken.append("a sequence's length or block count is outside its range")
    columns = np.arange(state.max_blocks_per_seq)
    released = count - np.count_nonzero(table >= 0, axis=1)
    in_use = (columns >= released[:, None]) & (columns < count[:, None])
    if not np.array_equal(table >= 0, in_use):
        broken.append(
            "a row of the table does not hold blocks exactly in its first columns, but for released ones"
        )
    if not np.array_equal(count, -(-lens // state.block_size)):
        broken.append("seq_block_count differs from what seq_lens need")
    writable = np.flatnonzero(lens % state.block_size)
    tail_column = np.clip(lens[writable] // state.block_size, 0, state.max_blocks_per_seq - 1)
    tails = table[writable, tail_column]
    if np.any(tails < 0) or np.any(ref_count[tails] != 1):
        broken.append("a partly filled tail block is missing, or has more than one reference")
    return broken


class Rows(NamedTuple):
    """The rows of a call, checked."""

    safe_ids: jax.Array  # int32 [B], an id that can be gathered with, whatever was given
    is_active: jax.Array  # bool [B], False for padding
    code: jax.Array  # int32 [B], 0 or the reason why the row cannot be served


def resolve_rows(state: BlockState, seq_ids: jax.Array, *, must_be_live: bool) -> Rows:
    """Check the rows' seq_ids: in range (-1 is padding), each at most once, live where they must be.

    Args:
      state: the allocator's state.
      seq_ids: int32 [B].
      must_be_live: whether a sequence without blocks is INVALID_SEQ.
    """
    seq_ids = as_int32("seq_ids", seq_ids, 1)
    num_rows, num_seqs = seq_ids.shape[0], state.max_seqs
    is_active = seq_ids != -1
    in_range = (seq_ids >= 0) & (seq_ids < num_seqs)
    safe_ids = jnp.where(in_range, seq_ids, 0)
    # The first row of each sequence wins; a negative index would wrap, so it is mapped past the end.
    row = jnp.arange(num_rows, dtype=jnp.int32)
    first_row = jnp.full(num_seqs, num_rows, jnp.int32)
    first_row = first_row.at[jnp.where(in_range, seq_ids, num_seqs)].min(row, mode="drop")
    is_duplicate = in_range & (first_row[safe_ids] < row)
    is_valid = in_range & (state.seq_block_count[safe_ids] > 0) if must_be_live else in_range
    code = jnp.where(is_active & ~is_valid, ResultCode.INVALID_SEQ, 0)
    code = jnp.where(is_duplicate, ResultCode.DUPLICATE_SEQ, code)
    return Rows(safe_ids, is_active, code.astype(jnp.int32))


def take_blocks(
    state: BlockState, needed: jax.Array, max_grant: int
) -> tuple[BlockState, jax.Array, jax.Array]:
    """Take `needed` blocks for each row off the free list, rows in order, all or nothing per row.

    Args:
      state: the allocator's state.
      needed: int32 [B], in [0, max_grant].
      max_grant: the most blocks one row may need (static).

    Returns:
      The state with `free_top` and `ref_count` new; int32 [B, max_grant], the blocks each row got,
      -1 beyond them; bool [B], the rows that need nothing or got what they need.
    """
    # The running total only grows, so that from the first row that does not fit on, no row that
    # needs a block fits: what is granted is a prefix.
    total = jnp.cumsum(needed, dtype=jnp.int32)
    fits = (needed == 0) | (total <= state.free_top)
    granted = jnp.where(fits, needed, 0)
    nth = jnp.arange(max_grant, dtype=jnp.int32)
    takes = nth < granted[:, None]  # [B, max_grant]
    source = state.free_top - 1 - ((total - needed)[:, None] + nth)
    blocks = jnp.where(takes, state.free_list[jnp.where(takes, source, 0)], -1)
    state = dataclasses.replace(
        state,
        free_top=state.free_top - jnp.sum(granted, dtype=jnp.int32),
        ref_count=state.ref_count.at[jnp.where(takes, blocks, state.num_blocks)].set(
            1, mode="drop"
        ),
    )
    return state, blocks, fits


def release_blocks(state: BlockState, blocks: jax.Array) -> tuple[BlockState, jax.Array]:
    """Drop one reference per entry of `blocks`; push those that nothing refers to any more.

    Args:
      state: the allocator's state.
      blocks: int32 [B, M], num_blocks where there is nothing to drop. A block may stand in several
        entries, once for each reference that goes.

    Returns:
      The state with `ref_count`, `free_list` and `free_top` new, and bool [B, M]: the entries whose
      block went back, one entry for each such block.
    """
    num_blocks = state.num_blocks
    ref_count = state.ref_count.at[blocks].add(-1, mode="drop")
    is_last = (blocks < num_blocks) & (ref_count.at[blocks].get(mode="clip") == 0)
    # Where several entries dropped the last references to a block, one of them pushes it: each
    # writes its number over the count of 0, the highest stays, and then 0 is put back.
    ticket = jnp.arange(1, blocks.size + 1, dtype=jnp.int32).reshape(blocks.shape)
    last = jnp.where(is_last, blocks, num_blocks)
    tickets = ref_count.at[last].max(ticket, mode="drop")
    released = is_last & (tickets.at[blocks].get(mode="clip") == ticket)
    # By `released`, not by `last`: what reads the tickets must come first, or XLA keeps a copy of them.
    ref_count = tickets.at[jnp.where(released, blocks, num_blocks)].set(0, mode="drop")
    target = state.free_top + (jnp.cumsum(released, dtype=jnp.int32) - 1).reshape(blocks.shape)
    return dataclasses.replace(
        state,
        ref_count=ref_count,
        free_list=state.free_list.at[jnp.where(released, target, num_blocks)].set(
            blocks, mode="drop"
        ),
        free_top=state.free_top + jnp.sum(released, dtype=jnp.int32),
    ), released
