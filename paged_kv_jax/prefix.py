"""Prefix reuse: sequences that start with the same tokens share the blocks that hold them.

The index (`PrefixIndex`) refers to blocks as sequences do: a block it holds is not free, and stays to be
found after the last sequence that used it has ended, until its space is needed. In the order of use:
`admit` starts sequences on top of what the index finds; the caller prefills the rest; `commit` lets the
index hold the blocks that are written now; `make_room` before an append evicts what nobody uses, least
recently used first, if too few blocks are free; `forget` drops everything when the weights change.

Rules as in `paged_kv_jax.allocator`. Costs O(B x M), but for an eviction, which sorts all N blocks and
is therefore done for a batch of blocks at a time.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.allocator import BlockState, _resolve, _take, check_invariants
from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.plan import as_int32
from paged_kv_jax.prefix_table import (
    PrefixIndex,
    count,
    drop_orphans,
    is_entry,
    place,
    prefix_hashes,
    previous,
    walk,
)


def match_prefix(
    index: PrefixIndex, tokens: jax.Array, lens: jax.Array, salt: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Which blocks hold the beginning of each prompt already; changes nothing. All prompts at once.

    A hit means equal tokens from the first on and an equal salt, compared one by one. The last token
    of a prompt is never covered: its logits are needed.

    Args:
      index: the index.
      tokens: int32 [B, T], prompts; what is past a prompt's length is not looked at.
      lens: int32 [B], tokens of each prompt; 0 for a padding row.
      salt: int32 [B], only blocks committed with the same salt are found; 0 if None.

    Returns:
      int32 [B, T // P], the blocks found, -1 beyond them; int32 [B], the tokens they hold.
    """
    tokens, lens, salt = _prompts(tokens, lens, salt)
    block_size = index.block_size
    limit = jnp.maximum(lens - 1, 0) // block_size
    hashes = prefix_hashes(tokens, salt, block_size)
    blocks, found = walk(index, tokens, hashes, salt, limit)
    return blocks, found * block_size


def admit(
    index: PrefixIndex,
    state: BlockState,
    seq_ids: jax.Array,
    tokens: jax.Array,
    lens: jax.Array,
    salt: jax.Array | None = None,
    *,
    batch: int | None = None,
) -> tuple[PrefixIndex, BlockState, jax.Array, jax.Array]:
    """Start sequences with room for their prompts, on top of the blocks that `match_prefix` finds.

    Evicts where too few blocks are free. What is left to prefill of row b are its last
    `lens[b] - num_found[b]` tokens: `make_plan(state, seq_ids, lens - num_found, result, ...)`.

    Args:
      index: the index.
      state: the allocator's state.
      seq_ids: int32 [B], sequences that are not live, each at most once; -1 for a padding row.
      tokens, lens, salt: the prompts, as for `match_prefix`.
      batch: as for `make_room`.

    Returns:
      The new index and state; int32 [B], the number of blocks newly taken, or OUT_OF_BLOCKS (-1);
      INVALID_SEQ (-2), out of range or live; SEQ_TOO_LONG (-3), the prompt needs more than M blocks;
      DUPLICATE_SEQ (-4); INVALID_COUNT (-5), `lens` below 1 or above T; and int32 [B], the number of
      tokens found, 0 for a row that failed.
    """
    rows = _resolve(state, seq_ids, must_be_live=False)
    tokens, lens, salt = _prompts(tokens, lens, salt, rows.code)
    block_size, max_blocks = state.block_size, state.max_blocks_per_seq
    code = jnp.where(-(-lens // block_size) > max_blocks, ResultCode.SEQ_TOO_LONG, 0)
    code = jnp.where((lens < 1) | (lens > tokens.shape[1]), ResultCode.INVALID_COUNT, code)
    code = jnp.where(state.seq_block_count[rows.safe_ids] > 0, ResultCode.INVALID_SEQ, code)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)

    limit = jnp.where(served, lens - 1, 0) // block_size
    hashes = prefix_hashes(tokens, salt, block_size)
    blocks, found = walk(index, tokens, hashes, salt, limit)

    # Referred to first, so that making room does not evict what was found.
    held = jnp.where(blocks >= 0, blocks, state.num_blocks)
    state = dataclasses.replace(state, ref_count=state.ref_count.at[held].add(1, mode="drop"))
    needed = jnp.where(served, -(-lens // block_size) - found, 0)
    index, state = make_room(index, state, needed, batch=batch)
    max_grant = min(max_blocks, -(-tokens.shape[1] // block_size))
    state, fresh, fits = _take(state, needed, max_grant)
    code = jnp.where(served & ~fits, ResultCode.OUT_OF_BLOCKS, code)
    served &= fits
    unused = jnp.where(served[:, None], state.num_blocks, held)  # still held by the index

    column = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.full((found.shape[0], max_blocks), -1, jnp.int32)
    row = row.at[:, : blocks.shape[1]].set(blocks[:, :max_blocks])
    nth = column - found[:, None]
    is_fresh = (nth >= 0) & (nth < max_grant)
    fresh = jnp.take_along_axis(fresh, jnp.where(is_fresh, nth, 0), axis=1)
    row = jnp.where(is_fresh, fresh, row)

    result = jnp.where(rows.is_active & (code < 0), code, jnp.where(served, needed, 0))
    found = jnp.where(served, found, 0)
    seq = jnp.where(served, rows.safe_ids, state.max_seqs)
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[seq].set(row, mode="drop"),
        seq_lens=state.seq_lens.at[seq].set(lens, mode="drop"),
        seq_block_count=state.seq_block_count.at[seq].set(-(-lens // block_size), mode="drop"),
        ref_count=state.ref_count.at[unused].add(-1, mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    index = _use(index, jnp.where(served[:, None], blocks, -1))
    looked_up = jnp.sum(jnp.where(served, limit, 0), dtype=jnp.int32)
    counts = count(index.counts, looked_up, jnp.sum(found, dtype=jnp.int32), jnp.int32(0))
    index = dataclasses.replace(index, counts=counts)
    return index, state, result, found * block_size


def commit(
    index: PrefixIndex,
    state: BlockState,
    seq_ids: jax.Array,
    tokens: jax.Array,
    lens: jax.Array,
    salt: jax.Array | None = None,
) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Let the index hold the full blocks of sequences, once their tokens are written in every layer.

    To be called after the prefill, and again before a sequence is freed if what it generated may be
    asked for again. Blocks that the index holds already, by the same tokens, are left alone.

    Args:
      index: the index.
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
      tokens: int32 [B, T], the sequences' tokens from their first on.
      lens: int32 [B], how many of them are written; only blocks that these fill are taken up.
      salt: int32 [B]; 0 if None.

    Returns:
      The new index and state, and int32 [B]: the number of blocks that the index holds now and did
      not before, or INVALID_SEQ (-2), out of range or not live; DUPLICATE_SEQ (-4);
      INVALID_COUNT (-5), `lens` negative, above T or above the sequence's length.
    """
    rows = _resolve(state, seq_ids, must_be_live=True)
    tokens, lens, salt = _prompts(tokens, lens, salt, rows.code)
    num_columns = min(tokens.shape[1] // state.block_size, state.max_blocks_per_seq)
    is_bad = (lens < 0) | (lens > tokens.shape[1]) | (lens > state.seq_lens[rows.safe_ids])
    code = jnp.where(is_bad, ResultCode.INVALID_COUNT, 0)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)

    full = jnp.where(served, lens // state.block_size, 0)
    hashes = prefix_hashes(tokens, salt, state.block_size)[:, :num_columns]
    known, found = walk(index, tokens, hashes, salt, full)
    own = state.block_table[rows.safe_ids, :num_columns]  # [B, M]
    column = jnp.arange(num_columns, dtype=jnp.int32)
    # New are the columns after those known, as far as each has a block that is not held elsewhere.
    is_known = column < found[:, None]
    is_new = ~is_known & (column < full[:, None]) & (own >= 0)
    is_new &= index.slot[jnp.maximum(own, 0)] < 0
    is_new &= jnp.cumsum(~is_known & ~is_new, axis=1, dtype=jnp.int32) == 0
    # A block that several rows share is put there by the first of them: each writes a number that is
    # the higher the earlier its row, the highest stays, and then -1 is put back, by the winner (what
    # reads the numbers must come before what overwrites them, or XLA keeps a copy of them).
    num_blocks = index.num_blocks
    ticket = jnp.arange(own.size, 0, -1, dtype=jnp.int32).reshape(own.shape)
    tickets = index.slot.at[jnp.where(is_new, own, num_blocks)].max(ticket, mode="drop")
    is_owner = is_new & (tickets[jnp.maximum(own, 0)] == ticket)
    slot = tickets.at[jnp.where(is_owner, own, num_blocks)].set(-1, mode="drop")
    index = dataclasses.replace(index, slot=slot)

    def record(index: PrefixIndex, where: jax.Array, **fields: jax.Array) -> PrefixIndex:
        into = jnp.where(where, own, num_blocks)
        return dataclasses.replace(
            index,
            **{
                name: getattr(index, name).at[into].set(value, mode="drop")
                for name, value in fields.items()
            },
        )

    by_block = tokens[:, : num_columns * state.block_size].reshape(*own.shape, state.block_size)
    index = record(
        index, is_owner, hashes=hashes, tokens=by_block,
        salt=jnp.broadcast_to(salt[:, None], own.shape), depth=jnp.broadcast_to(column, own.shape),
    )  # fmt: skip
    table, entry, at = place(index, own, hashes, is_owner, is_new & ~is_owner)
    chain = jnp.where(is_known, known, entry)
    is_winner = is_owner & (entry == own)
    index = record(index, is_winner, parent=previous(chain))

    # What was found under an equal hash must be equal, and so must all before it.
    is_right = is_known | (is_new & is_entry(index, chain, previous(chain), tokens, salt))
    is_right = jnp.cumsum(~is_right, axis=1, dtype=jnp.int32) == 0
    table = table.at[jnp.where(is_winner & ~is_right, at, table.shape[0])].set(-1, mode="drop")
    is_winner &= is_right
    index = record(dataclasses.replace(index, table=table), is_winner, slot=at)
    table, slot = drop_orphans(index.table, index.slot, index.parent, jnp.where(is_winner, own, -1))
    is_winner &= slot[jnp.maximum(own, 0)] >= 0
    left_out = jnp.sum(is_owner & ~is_right, dtype=jnp.int32)
    counts = count(index.counts, jnp.int32(0), jnp.int32(0), left_out)
    index = dataclasses.replace(index, table=table, slot=slot, counts=counts)
    index = _use(index, jnp.where(is_right & (column < full[:, None]), chain, -1))

    result = jnp.sum(is_winner, axis=1, dtype=jnp.int32)
    result = jnp.where(rows.is_active & (code < 0), code, result)
    state = dataclasses.replace(
        state,
        ref_count=state.ref_count.at[jnp.where(is_winner, own, num_blocks)].add(1, mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    return index, state, result


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
        available = free_top + jnp.sum(_is_idle(full, used), dtype=jnp.int32)
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
    is_idle = _is_idle(index, state)
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


class PrefixStats(NamedTuple):
    """What reuse has brought so far. Python numbers."""

    looked_up_tokens: int
    """Tokens in the whole blocks of admitted prompts, but for blocks with a prompt's last token."""
    found_tokens: int
    """Those that were found, and need no prefill."""
    hit_rate: float
    """Found over looked up; 0 where nothing was looked up."""
    held_blocks: int
    """Blocks that the index refers to."""
    idle_blocks: int
    """Those of them that no sequence refers to: what can be evicted."""
    left_out_blocks: int
    """Full blocks that a commit left out, with all that follow them in their rows: a hash collided, all
    places in the table were taken, or a block before them was given back."""


def prefix_stats(index: PrefixIndex, state: BlockState) -> PrefixStats:
    """Hit statistics and what the index holds. For the host."""
    low, high = np.asarray(index.counts).astype(object).T
    looked_up, found, left_out = (int(a) + (int(b) << 32) for a, b in zip(low, high, strict=True))
    held = np.asarray(index.is_held)
    return PrefixStats(
        looked_up_tokens=looked_up * index.block_size,
        found_tokens=found * index.block_size,
        hit_rate=found / looked_up if looked_up else 0.0,
        held_blocks=int(held.sum()),
        idle_blocks=int(np.sum(_is_idle(index, state))),
        left_out_blocks=left_out,
    )


def check_index(index: PrefixIndex, state: BlockState) -> list[str]:
    """Which invariants of `PrefixIndex` and of `BlockState` with it are broken. For the host only."""
    broken = check_invariants(state, index.is_held)
    table, slot, parent, depth, salt, tokens, last_used = (
        np.asarray(getattr(index, name))
        for name in ("table", "slot", "parent", "depth", "salt", "tokens", "last_used")
    )
    held = np.flatnonzero(slot >= 0)
    if not np.array_equal(np.sort(table[table >= 0]), held) or np.any(table[slot[held]] != held):
        broken.append("the table and the places of the held blocks differ")
    children = held[parent[held] >= 0]
    if np.any(slot[parent[children]] < 0):
        broken.append("a held block's parent is not held")
    if np.any(depth[children] != depth[parent[children]] + 1) or np.any(
        depth[held[parent[held] < 0]] != 0
    ):
        broken.append("a held block's depth does not follow its parent's")
    age = np.uint32(index.clock) - last_used  # modulo 2^32
    if np.any(age[parent[children]] > age[children]):
        broken.append("a parent was used less recently than its child")
    names = {(int(parent[block]), int(salt[block]), *tokens[block].tolist()) for block in held}
    if len(names) != len(held):
        broken.append("two held blocks have the same parent, tokens and salt")
    return broken


def _prompts(
    tokens: jax.Array, lens: jax.Array, salt: jax.Array | None, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens, lens = as_int32("tokens", tokens, 2), as_int32("lens", lens, 1)
    salt = jnp.zeros_like(lens) if salt is None else as_int32("salt", salt, 1)
    num_rows = tokens.shape[0] if rows is None else rows.shape[0]
    for name, array in (("tokens", tokens), ("lens", lens), ("salt", salt)):
        if array.shape[0] != num_rows:
            raise ValueError(f"{name} has shape {array.shape}; there are {num_rows} rows")
    return tokens, lens, salt


def _is_idle(index: PrefixIndex, state: BlockState) -> jax.Array:
    """bool [N]: the blocks that only the index refers to."""
    return index.is_held & (state.ref_count == 1)


def _use(index: PrefixIndex, blocks: jax.Array) -> PrefixIndex:
    """The index with `blocks` (-1 for none) used now."""
    used = jnp.where(blocks >= 0, blocks, index.num_blocks)
    last_used = index.last_used.at[used].set(index.clock, mode="drop")
    return dataclasses.replace(index, last_used=last_used, clock=index.clock + jnp.uint32(1))


def _drop(
    index: PrefixIndex, state: BlockState, order: jax.Array, goes: jax.Array
) -> tuple[PrefixIndex, BlockState, jax.Array]:
    """Drop those of the blocks `order` [N] that `goes` [N] says, and what hangs below them."""
    at = jnp.where(goes, index.slot[order], index.table.shape[0])
    table = index.table.at[at].set(-1, mode="drop")
    slot = index.slot.at[jnp.where(goes, order, index.num_blocks)].set(-1, mode="drop")
    return settle(index, state, table, slot, order)


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
