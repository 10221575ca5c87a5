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

from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.eviction import idle_blocks, make_room
from paged_kv_jax.plan import as_int32
from paged_kv_jax.prefix_table import (
    PrefixIndex,
    count,
    drop_orphans,
    is_entry,
    leading,
    place,
    prefix_hashes,
    previous,
    walk,
)
from paged_kv_jax.state import BlockState, check_invariants, resolve_rows, take_blocks


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
    rows = resolve_rows(state, seq_ids, must_be_live=False)
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
    state, fresh, fits = take_blocks(state, needed, max_grant)
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
    rows = resolve_rows(state, seq_ids, must_be_live=True)
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
    is_new &= column < leading(is_known | is_new)[:, None]
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
    is_right = column < leading(is_right)[:, None]
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
        idle_blocks=int(np.sum(idle_blocks(index, state))),
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


def _use(index: PrefixIndex, blocks: jax.Array) -> PrefixIndex:
    """The index with `blocks` (-1 for none) used now."""
    used = jnp.where(blocks >= 0, blocks, index.num_blocks)
    last_used = index.last_used.at[used].set(index.clock, mode="drop")
    return dataclasses.replace(index, last_used=last_used, clock=index.clock + jnp.uint32(1))
