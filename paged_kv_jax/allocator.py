"""The block allocator: pure functions over an immutable `BlockState`, all jittable.

In the order of a block's life: state, init, allocate, append, free, plan, query, validate. Each
operation takes B rows at once, `(state, rows...) -> (state, result)`, and costs O(B x blocks touched),
whatever the size of the pool. It descends from a C allocator with a static free list and from the
block tables of vLLM (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023).

Rules of every operation, row by row:
  * `seq_ids` names the sequence of each row; -1 is a padding row, which does nothing and yields 0.
  * All or nothing: a row that fails changes nothing of its sequence. Rows are served in order, and
    once a row finds too few free blocks, each later row that needs a block fails as well, so that
    small requests cannot starve a big one.
  * The result is >= 0 on success and a `ResultCode` otherwise; a failure also sets the sticky word
    `state.errors`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.plan import Plan, as_int32, build_plan, narrow


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


def init(config: KVCacheConfig) -> BlockState:
    """A state in which every block is free and no sequence is live."""
    num_blocks, num_seqs = config.num_blocks, config.max_seqs
    return BlockState(
        block_table=jnp.full((num_seqs, config.max_blocks_per_seq), -1, jnp.int32),
        seq_lens=jnp.zeros(num_seqs, jnp.int32),
        seq_block_count=jnp.zeros(num_seqs, jnp.int32),
        # Popped from the end: block 0 is handed out first.
        free_list=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        free_top=jnp.int32(num_blocks),
        ref_count=jnp.zeros(num_blocks, jnp.int32),
        errors=jnp.int32(0),
        block_size=config.block_size,
    )


def allocate(
    state: BlockState,
    seq_ids: jax.Array,
    num_tokens: jax.Array | int,
    *,
    max_new_tokens: int | None = None,
) -> tuple[BlockState, jax.Array]:
    """Give sequences room for `num_tokens` more tokens, starting those that are not live.

    A live sequence's tail block is filled before a new one is taken.

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], in [0, S), each at most once; -1 for a padding row.
      num_tokens: tokens to add: an int for every row alike, or int32 [B].
      max_new_tokens: for an array `num_tokens`, a static bound on its values that keeps the work at
        O(B * max_new_tokens / P) rather than O(B * M).

    Returns:
      The new state, and int32 [B]: the number of blocks newly taken (0 for a padding row), or
      OUT_OF_BLOCKS (-1); INVALID_SEQ (-2), seq_id out of range; SEQ_TOO_LONG (-3), the row would
      pass M blocks; DUPLICATE_SEQ (-4), an earlier row has the seq_id; INVALID_COUNT (-5),
      `num_tokens` negative or above `max_new_tokens`.
    """
    return _grow(state, seq_ids, num_tokens, max_new_tokens, must_be_live=False)


def append(
    state: BlockState,
    seq_ids: jax.Array,
    num_new_tokens: jax.Array | int,
    *,
    max_new_tokens: int | None = None,
) -> tuple[BlockState, jax.Array]:
    """Lengthen live sequences by `num_new_tokens` tokens, taking blocks where a tail is full.

    As `allocate`, but a sequence that is not live fails with INVALID_SEQ (-2): a compiled step that
    still names a freed sequence touches nothing.

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
      num_new_tokens: tokens to add: an int for every row alike (decode: 1), or int32 [B].
      max_new_tokens: as for `allocate`.

    Returns:
      The new state and int32 [B], as for `allocate`.
    """
    return _grow(state, seq_ids, num_new_tokens, max_new_tokens, must_be_live=True)


def free(state: BlockState, seq_ids: jax.Array) -> tuple[BlockState, jax.Array]:
    """End sequences and give their blocks back.

    A block goes back to the free list once nothing refers to it any more.

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.

    Returns:
      The new state, and int32 [B]: the number of blocks that went back to the free list (0 for a
      padding row), or INVALID_SEQ (-2), out of range or not live; DUPLICATE_SEQ (-4).
    """
    rows = _resolve(state, seq_ids, must_be_live=True)
    ends = rows.is_active & (rows.code >= 0)
    blocks = state.block_table[rows.safe_ids]
    held = ends[:, None] & (blocks >= 0)
    state, released = _release(state, jnp.where(held, blocks, state.num_blocks))
    ended = jnp.where(ends, rows.safe_ids, state.max_seqs)
    result = jnp.where(rows.code < 0, rows.code, jnp.sum(released, axis=1, dtype=jnp.int32))
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[ended].set(-1, mode="drop"),
        seq_lens=state.seq_lens.at[ended].set(0, mode="drop"),
        seq_block_count=state.seq_block_count.at[ended].set(0, mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    return state, result


def make_plan(
    state: BlockState,
    seq_ids: jax.Array,
    num_new_tokens: jax.Array | int,
    result: jax.Array,
    *,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
) -> Plan:
    """The plan for the tokens that the last `allocate` or `append` made room for.

    Args:
      state: the state after that call.
      seq_ids: int32 [B], as given to it.
      num_new_tokens: the tokens each row brings. An int n: every row has n places, T = B * n, and
        token b * n + i belongs to row b, also where other rows take no part (the layout of decode,
        n = 1, and of speculative verification). int32 [B]: the rows that take part are packed one
        after another.
      result: int32 [B], what that call returned; rows that failed take no part. Without it, a row
        that got no room would overwrite the last tokens it has.
      num_tokens: T, required where `num_new_tokens` is an array.
      max_query_len: the most tokens one row may bring (static; a bound of 8 or less lets decode
        kernels serve the plan); T if not given. Only for an array `num_new_tokens`.

    Returns:
      The plan. A row that does not fit into T or `max_query_len` is left out and sets PLAN_OVERFLOW
      in `plan.errors`.

    Raises:
      ValueError, TypeError: shapes, dtypes or static arguments that cannot work.
    """
    seq_ids = as_int32("seq_ids", seq_ids, 1)
    result = as_int32("result", result, 1)
    if result.shape != seq_ids.shape:
        raise ValueError(f"result has shape {result.shape} and seq_ids {seq_ids.shape}; must agree")
    in_range = (seq_ids >= 0) & (seq_ids < state.max_seqs)
    safe_ids = jnp.where(in_range, seq_ids, 0)
    kv_lens = state.seq_lens[safe_ids]
    takes_part = in_range & (kv_lens > 0) & (result >= 0)
    counts, _ = _token_counts("num_new_tokens", num_new_tokens, seq_ids.shape, None)
    return build_plan(
        jnp.where(takes_part[:, None], state.block_table[safe_ids], -1),
        kv_lens,
        takes_part,
        counts,
        block_size=state.block_size,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
    )


def block_count(state: BlockState, seq_ids: jax.Array) -> jax.Array:
    """int32, shape of `seq_ids`: table columns each sequence uses; 0 for one not live or out of range."""
    seq_ids = jnp.asarray(seq_ids)
    in_range = (seq_ids >= 0) & (seq_ids < state.max_seqs)
    return jnp.where(in_range, state.seq_block_count[jnp.where(in_range, seq_ids, 0)], 0)


def block_offset(state: BlockState, seq_ids: jax.Array, block_index: jax.Array) -> jax.Array:
    """First slot of the `block_index`-th block of each sequence.

    Args:
      state: the allocator's state.
      seq_ids: int32, any shape.
      block_index: int32, broadcast against `seq_ids`; 0 is the sequence's first block.

    Returns:
      int32: `block * P`, a slot of the pool (times `config.token_stride` for an offset in elements),
      or -1 where the sequence has no such block.
    """
    seq_ids, block_index = jnp.broadcast_arrays(jnp.asarray(seq_ids), jnp.asarray(block_index))
    exists = (block_index >= 0) & (block_index < block_count(state, seq_ids))
    block = state.block_table[jnp.where(exists, seq_ids, 0), jnp.where(exists, block_index, 0)]
    return jnp.where(exists & (block >= 0), block * state.block_size, -1)


class Stats(NamedTuple):
    """How full the pool is; scalars, int32 but for `utilisation`, float32."""

    free_blocks: jax.Array
    used_blocks: jax.Array
    live_seqs: jax.Array
    tokens: jax.Array
    """Lengths of all sequences; a token that several sequences share counts for each."""
    wasted_slots: jax.Array
    """Slots of used blocks that hold no token: the tails."""
    utilisation: jax.Array
    """Filled slots over the slots of used blocks; 1 where no block is used."""


def stats(state: BlockState) -> Stats:
    """How many blocks are free and used, and how well the used ones are filled. Jittable."""
    used = state.num_blocks - state.free_top
    slots = used * state.block_size
    # Blocks that are shared, or that only an index holds, are full: what is empty is in the tails.
    capacity = state.seq_block_count * state.block_size
    wasted = jnp.sum(capacity - state.seq_lens, dtype=jnp.int32)
    filled = (slots - wasted) / jnp.maximum(slots, 1)
    return Stats(
        free_blocks=state.free_top,
        used_blocks=used,
        live_seqs=jnp.sum(state.seq_lens > 0, dtype=jnp.int32),
        tokens=jnp.sum(state.seq_lens, dtype=jnp.int32),
        wasted_slots=wasted,
        utilisation=jnp.where(used > 0, filled, 1.0).astype(jnp.float32),
    )


def clear_errors(state: BlockState) -> BlockState:
    """The state with its sticky word reset, for a caller who has handled what it reported."""
    return dataclasses.replace(state, errors=jnp.zeros_like(state.errors))


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


class _Rows(NamedTuple):
    safe_ids: jax.Array  # int32 [B], an id that can be gathered with, whatever was given
    is_active: jax.Array  # bool [B], False for padding
    code: jax.Array  # int32 [B], 0 or the reason why the row cannot be served


def _resolve(state: BlockState, seq_ids: jax.Array, *, must_be_live: bool) -> _Rows:
    """Check the rows' seq_ids."""
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
    return _Rows(safe_ids, is_active, code.astype(jnp.int32))


def _token_counts(
    name: str, counts: jax.Array | int, shape: tuple[int, ...], bound: int | None
) -> tuple[jax.Array | int, int | None]:
    """`counts` as an int or as int32 of `shape`, and the static bound on it, if there is one."""
    if isinstance(counts, int | np.integer) and not isinstance(counts, bool):
        if counts > jnp.iinfo(jnp.int32).max:
            raise ValueError(f"{name}={counts} must be below 2^31")
        return int(counts), int(counts)
    array = jnp.asarray(counts)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be an int or an integer array")
    if array.shape not in ((), shape):
        raise ValueError(f"{name} has shape {array.shape}; it must have one entry per row: {shape}")
    return jnp.broadcast_to(narrow(array), shape), bound


def _grow(
    state: BlockState,
    seq_ids: jax.Array,
    counts: jax.Array | int,
    max_new_tokens: int | None,
    *,
    must_be_live: bool,
) -> tuple[BlockState, jax.Array]:
    rows = _resolve(state, seq_ids, must_be_live=must_be_live)
    counts, bound = _token_counts("the token count", counts, rows.code.shape, max_new_tokens)
    block_size, max_blocks = state.block_size, state.max_blocks_per_seq
    max_grant = max_blocks
    is_bad_count = jnp.asarray(counts) < 0
    if bound is not None:
        max_grant = min(max_blocks, -(-max(bound, 0) // block_size))
        is_bad_count |= counts > bound
    seq_len, owned = state.seq_lens[rows.safe_ids], state.seq_block_count[rows.safe_ids]

    # Compared by subtraction, since seq_len + counts may pass 2^31.
    is_too_long = counts > max_blocks * block_size - seq_len
    code = jnp.where(is_too_long, ResultCode.SEQ_TOO_LONG, 0)
    code = jnp.where(is_bad_count, ResultCode.INVALID_COUNT, code)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)
    added = jnp.where(served, counts, 0)
    needed = jnp.where(served, -(-(seq_len + added) // block_size) - owned, 0)

    state, blocks, fits = _take(state, needed, max_grant)
    code = jnp.where(served & ~fits, ResultCode.OUT_OF_BLOCKS, code)
    served &= fits
    granted = jnp.where(served, needed, 0)

    grown = jnp.where(served, rows.safe_ids, state.max_seqs)
    result = jnp.where(rows.is_active & (code < 0), code, granted).astype(jnp.int32)
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[
            jnp.where(blocks >= 0, rows.safe_ids[:, None], state.max_seqs),
            owned[:, None] + jnp.arange(max_grant, dtype=jnp.int32),
        ].set(blocks, mode="drop"),
        seq_lens=state.seq_lens.at[grown].add(added, mode="drop"),
        seq_block_count=state.seq_block_count.at[grown].add(granted, mode="drop"),
        errors=state.errors | sticky_bits(result),
    )
    return state, result


def _take(
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


def _release(state: BlockState, blocks: jax.Array) -> tuple[BlockState, jax.Array]:
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
