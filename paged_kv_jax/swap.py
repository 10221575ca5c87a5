"""Sequences moved to host memory and back, to make room for others without computing them again.

A scheduler's decision, so these run on the host, between compiled steps: they look at the tables, move
each sequence's blocks, all layers at once, in one transfer each way, and update the state. The blocks
are read into arrays of their own before they go back to the free list, so that whatever is written into
the pool next, in place or not, cannot reach what is still being copied.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.allocator import free
from paged_kv_jax.errors import ResultCode, sticky_bits
from paged_kv_jax.pool import KVPool
from paged_kv_jax.state import BlockState, resolve_rows, take_blocks


class HostSequence(NamedTuple):
    """A sequence in host memory.

    Attributes:
      k, v: [L, C, P, K, D], its blocks in order, the first `num_blocks` of C.
      length: its tokens.
      first_column: columns of its table before the first block; those hold -1 (`release_before`).
      num_blocks: its blocks.
    """

    k: Any
    v: Any
    length: int
    first_column: int
    num_blocks: int


@dataclasses.dataclass(frozen=True, eq=False)
class HostPool:
    """Sequences in host memory, at most `capacity` blocks. Immutable; lives on the host.

    Blocks are held in the backend's pinned host memory where it has some of its own, which transfers
    take directly, and as numpy arrays elsewhere.

    Attributes:
      capacity: blocks there is room for.
      sequences: by seq_id.
    """

    capacity: int
    sequences: Mapping[int, HostSequence] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity={self.capacity} must be at least 1 block")

    @property
    def used_blocks(self) -> int:
        """Blocks in use."""
        return sum(sequence.num_blocks for sequence in self.sequences.values())


def swap_out(
    state: BlockState, pool: KVPool, host: HostPool, seq_ids: Sequence[int] | jax.Array
) -> tuple[BlockState, HostPool, np.ndarray]:
    """Move sequences into host memory and give their blocks back. Not for use inside `jax.jit`.

    What sequences share is copied for each of them; it stays on the device for the others.

    Args:
      state: the allocator's state.
      pool: the pools; they stay as they are.
      host: where to put the sequences.
      seq_ids: int [B], live sequences, each at most once; -1 for a padding row.

    Returns:
      The new state and host pool, and int32 [B]: the number of blocks moved, or OUT_OF_BLOCKS (-1),
      the host pool is full; INVALID_SEQ (-2), out of range, not live, or in the host pool already;
      DUPLICATE_SEQ (-4). Rows are served in order, all or nothing, as in `allocate`.
    """
    ids = _host_ids(seq_ids)
    table, lens = np.asarray(state.block_table), np.asarray(state.seq_lens)
    sequences, room = dict(host.sequences), host.capacity - host.used_blocks
    result = np.zeros(len(ids), np.int32)
    for row, seq in enumerate(ids.tolist()):
        if seq == -1:
            continue
        if not 0 <= seq < state.max_seqs:
            result[row] = ResultCode.INVALID_SEQ
        elif seq in ids[:row]:
            result[row] = ResultCode.DUPLICATE_SEQ
        elif lens[seq] == 0 or seq in host.sequences:
            result[row] = ResultCode.INVALID_SEQ
        else:
            columns = np.flatnonzero(table[seq] >= 0)
            if len(columns) > room:
                room = 0  # no later row passes this one, unless it needs no block
                result[row] = ResultCode.OUT_OF_BLOCKS
                continue
            room -= len(columns)
            result[row] = len(columns)
            blocks = _padded(table[seq, columns], fill=0)
            k, v = (_to_host(side) for side in _read_blocks(pool, blocks))
            first = -(-int(lens[seq]) // state.block_size) - len(columns)
            sequences[seq] = HostSequence(k, v, int(lens[seq]), first, len(columns))
    gone = np.where(result >= 0, ids, -1)
    state, _ = _free(state, jnp.asarray(gone))
    state = dataclasses.replace(state, errors=state.errors | sticky_bits(jnp.asarray(result)))
    return state, dataclasses.replace(host, sequences=sequences), result


def swap_in(
    state: BlockState, pool: KVPool, host: HostPool, seq_ids: Sequence[int] | jax.Array
) -> tuple[BlockState, KVPool, HostPool, np.ndarray]:
    """Move sequences back from host memory, under their ids. Not for use inside `jax.jit`.

    Args:
      state: the allocator's state.
      pool: the pools; donated, so that they are written in place: use the returned ones.
      host: where the sequences are.
      seq_ids: int [B], sequences in the host pool, each at most once; -1 for a padding row.

    Returns:
      The new state, pools and host pool, and int32 [B]: the number of blocks taken, or
      OUT_OF_BLOCKS (-1), the sequence stays in the host pool; INVALID_SEQ (-2), not in the host pool,
      out of range, or live; DUPLICATE_SEQ (-4).
    """
    ids = _host_ids(seq_ids)
    empty = HostSequence(None, None, 0, 0, 0)
    rows = [host.sequences.get(seq, empty) for seq in ids.tolist()]
    state, result, blocks = _restore(
        state,
        jnp.asarray(ids),
        jnp.asarray([row is not empty for row in rows]),
        *(
            jnp.asarray([getattr(row, name) for row in rows], jnp.int32)
            for name in ("length", "first_column", "num_blocks")
        ),
    )
    result, blocks = np.asarray(result), np.asarray(blocks)
    sequences = dict(host.sequences)
    for seq, row, code, taken in zip(ids.tolist(), rows, result, blocks, strict=True):
        if seq == -1 or code < 0:
            continue
        del sequences[seq]
        if row.num_blocks:
            into = _padded(taken[:code], fill=pool.num_blocks)
            pool = _write_blocks(pool, into, *_to_device(pool, row))
    return state, pool, dataclasses.replace(host, sequences=sequences), result


_free = jax.jit(free)


@jax.jit
def _read_blocks(pool: KVPool, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    return pool.k[:, blocks], pool.v[:, blocks]


@functools.partial(jax.jit, donate_argnames="pool")
def _write_blocks(pool: KVPool, blocks: jax.Array, k: jax.Array, v: jax.Array) -> KVPool:
    return KVPool(
        k=pool.k.at[:, blocks].set(k, mode="drop"), v=pool.v.at[:, blocks].set(v, mode="drop")
    )


@jax.jit
def _restore(
    state: BlockState,
    seq_ids: jax.Array,
    is_known: jax.Array,
    lens: jax.Array,
    first_columns: jax.Array,
    needed: jax.Array,
) -> tuple[BlockState, jax.Array, jax.Array]:
    """Start sequences of known lengths in fresh blocks: state, result [B], and the blocks [B, M]."""
    rows = resolve_rows(state, seq_ids, must_be_live=False)
    is_live = state.seq_block_count[rows.safe_ids] > 0
    code = jnp.where(rows.is_active & (is_live | ~is_known), ResultCode.INVALID_SEQ, 0)
    code = jnp.where(rows.code < 0, rows.code, code)
    served = rows.is_active & (code >= 0)
    max_blocks = state.max_blocks_per_seq
    state, blocks, fits = take_blocks(state, jnp.where(served, needed, 0), max_blocks)
    code = jnp.where(served & ~fits, ResultCode.OUT_OF_BLOCKS, code)
    served &= fits
    nth = jnp.arange(max_blocks, dtype=jnp.int32) - first_columns[:, None]
    table = jnp.take_along_axis(blocks, jnp.maximum(nth, 0), axis=1)
    table = jnp.where(nth >= 0, table, -1)
    seq = jnp.where(served, rows.safe_ids, state.max_seqs)
    result = jnp.where(rows.is_active & (code < 0), code, jnp.where(served, needed, 0))
    state = dataclasses.replace(
        state,
        block_table=state.block_table.at[seq].set(table, mode="drop"),
        seq_lens=state.seq_lens.at[seq].set(lens, mode="drop"),
        seq_block_count=state.seq_block_count.at[seq].set(
            -(-lens // state.block_size), mode="drop"
        ),
        errors=state.errors | sticky_bits(result),
    )
    return state, result.astype(jnp.int32), blocks


def _host_ids(seq_ids: Sequence[int] | jax.Array) -> np.ndarray:
    ids = np.asarray(seq_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"seq_ids has shape {ids.shape} and dtype {ids.dtype}; it must be int [B]")
    return ids.astype(np.int32)


def _padded(blocks: np.ndarray, fill: int) -> jax.Array:
    """The block ids, padded to a power of two, so that few different programs are compiled."""
    padded = np.full(1 << max(0, len(blocks) - 1).bit_length(), fill, np.int32)
    padded[: len(blocks)] = blocks
    return jnp.asarray(padded)


def _to_host(array: jax.Array) -> Any:
    """`array` in the backend's pinned host memory, or in numpy's where the device has no other."""
    (device, *_) = array.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return np.asarray(array)
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def _to_device(pool: KVPool, sequence: HostSequence) -> tuple[jax.Array, jax.Array]:
    return tuple(jax.device_put(side, pool.k.sharding) for side in (sequence.k, sequence.v))
