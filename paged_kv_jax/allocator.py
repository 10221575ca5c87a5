"""The block allocator: pure functions over an immutable `BlockState`, all jittable.

In the order of a block's life: init, allocate, append, free, plan, query. Each
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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax import dispatch
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.plan import Plan, as_int32, build_plan, narrow, with_shared_prefix
from paged_kv_jax.state import BlockState, release_blocks, resolve_rows, take_blocks


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
    rows = resolve_rows(state, seq_ids, must_be_live=True)
    ends = rows.is_active & (rows.code >= 0)
    blocks = state.block_table[rows.safe_ids]
    held = ends[:, None] & (blocks >= 0)
    state, released = release_blocks(state, jnp.where(held, blocks, state.num_blocks))
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
    shared_prefix: bool = False,
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
      shared_prefix: find the beginnings that consecutive rows have in common, for `paged_attention`
        to compute once (static). Worth it where many rows share long ones: put the samples of a
        prompt next to one another. Where nothing is shared, it costs a pass over nothing.

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
        shared_prefix=shared_prefix,
    )


def step(
    state: BlockState,
    seq_ids: jax.Array,
    num_new_tokens: jax.Array | int,
    *,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
    shared_prefix: bool = False,
    implementation: str | None = None,
) -> tuple[BlockState, Plan, jax.Array]:
    """`append`, then `make_plan`: what a loop does each step, in one kernel where there is one.

    Args:
      state: the allocator's state.
      seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
      num_new_tokens: tokens to add: an int for every row alike (decode: 1), or int32 [B].
      num_tokens, max_query_len: as for `make_plan`; the latter, or else the former, also bounds an
        array `num_new_tokens`.
      shared_prefix: as for `make_plan`.
      implementation: "triton" or "xla"; None picks the best that supports the call. They agree in
        every bit.

    Returns:
      The new state, whose sticky word `plan.errors` has joined; the plan; and int32 [B], the result
      of `append`.

    Raises:
      ValueError, TypeError: shapes, dtypes or static arguments that cannot work.
      NotImplementedError: the implementation asked for cannot serve the call; the message says why.
    """
    seq_ids = as_int32("seq_ids", seq_ids, 1)
    counts, _ = _token_counts("num_new_tokens", num_new_tokens, seq_ids.shape, None)
    name = dispatch.pick("step", implementation, seq_ids, state.block_table, num_new_tokens=counts)
    # Sizes do not go with an int; make_plan says so.
    if name == "xla" or num_tokens is not None or max_query_len is not None:
        state, result = append(state, seq_ids, counts, max_new_tokens=max_query_len or num_tokens)
        plan = make_plan(
            state, seq_ids, counts, result,
            num_tokens=num_tokens, max_query_len=max_query_len, shared_prefix=shared_prefix,
        )  # fmt: skip
        return dataclasses.replace(state, errors=state.errors | plan.errors), plan, result

    kernel = dispatch.kernel("step", name)
    table, lens, owned, free_top, ref_count, errors, result, *arrays = kernel(
        state.block_table, state.seq_lens, state.seq_block_count, state.free_list, state.free_top,
        state.ref_count, state.errors, seq_ids,
        num_new_tokens=counts, block_size=state.block_size,
    )  # fmt: skip
    state = BlockState(
        table, lens, owned, state.free_list, free_top, ref_count, errors, state.block_size
    )
    plan = Plan(*arrays, block_size=state.block_size, max_query_len=int(counts))
    return state, with_shared_prefix(plan) if shared_prefix else plan, result


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
    rows = resolve_rows(state, seq_ids, must_be_live=must_be_live)
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

    state, blocks, fits = take_blocks(state, needed, max_grant)
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
