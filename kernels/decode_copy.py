"""The copying warps of the decode kernel: TMA copies of q, K and V into shared memory, ahead of use.

Warps 0 and 1 bring K and q, warps 2 and 3 bring V. A copy that a whole warpgroup issues costs 128
arrivals at a barrier; a warp alone makes half of them, and four warps issue at the same time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .decode_problem import Kernel
from .decode_schedule import Piece
from .schedule import Scalar, div, rem

# Block ids that a warp reads before it issues their copies, so that those loads overlap.
MAX_UNROLL = 8


def copy_warp(kernel: Kernel, warp: Scalar) -> None:
    """All that one copying warp does."""
    kernel.schedule.plan(warp, kernel.rank, kernel.barriers["summed"], kernel.barriers["planned"])
    workers = min(2, kernel.problem.copies)
    worker = rem(warp, 2)

    @pl.when(worker < workers)
    def _():
        pl.when(warp < 2)(lambda: _copy_pool(kernel, "k", worker, workers))
        pl.when(warp >= 2)(lambda: _copy_pool(kernel, "v", worker, workers))


def _copy_pool(kernel: Kernel, name: str, worker: Scalar, workers: int) -> None:
    """Brings the worker's share of K or V for all of this CTA's pieces."""
    stages, empty = kernel.problem.stages, kernel.barriers["empty"]

    def copy_piece(piece: Piece) -> None:
        if name == "k":
            pl.when(worker == 0)(lambda: _copy_q(kernel, piece))

        def step(i, _):
            slot = kernel.slot(piece, i)

            @pl.when(piece.tiles_before + i >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            copy_tile(kernel, name, piece, i, slot, worker, workers)
            return ()

        lax.fori_loop(0, piece.tiles, step, ())

    pieces, tiles = kernel.schedule.pieces(kernel.rank, copy_piece)
    drain(empty, tiles, stages)
    if name == "k":
        pl.when(worker == 0)(lambda: drain(kernel.barriers["q_empty"], pieces, 2))


def drain(barrier: Any, used: Scalar, slots: int) -> None:
    """Waits for the last use of each slot: no barrier is left with a phase that nobody saw."""

    def wait(i, _):
        plgpu.barrier_wait(barrier.at[rem(jnp.maximum(used - slots, 0) + i, slots)])
        return ()

    lax.fori_loop(0, jnp.minimum(used, slots), wait, ())


def _copy_q(kernel: Kernel, piece: Piece) -> None:
    p = kernel.problem
    slot = rem(piece.index, 2)

    @pl.when(piece.index >= 2)
    def _():
        plgpu.barrier_wait(kernel.barriers["q_empty"].at[slot])

    first_row = kernel.query_rows(piece)[0]
    for i in range(p.token_columns):
        # Where the row has fewer tokens, its last one fills the columns; nobody stores those.
        token = jnp.minimum(piece.token_group * p.token_columns + i, piece.facts.q_len - 1)
        plgpu.copy_gmem_to_smem(
            kernel.gmem["q"].at[piece.facts.first_token + token, pl.ds(first_row, p.head_columns)],
            kernel.smem["q"].at[slot, pl.ds(i * p.head_columns, p.head_columns)],
            kernel.barriers["q_full"].at[slot],
        )


def copy_tile(
    kernel: Any,
    name: str,
    piece: Any,
    tile: Scalar,
    slot: Scalar,
    worker: Scalar,
    workers: int,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Brings the worker's blocks of a tile. Blocks that no query sees are not read, nor their ids.

    Args:
      kernel, piece: of the decode or of the prefill kernel.
      name: "k" or "v".
      tile: of the piece.
      slot: where in the ring of stages it goes.
      worker, workers: which of how many warps this is.
      wait: waits until the slot is free; called when the first block ids are on their way.
    """
    p, facts = kernel.problem, piece.facts
    full = kernel.barriers[name + "_full"].at[slot]
    token0 = (piece.first_tile + tile) * p.tile_tokens
    count = p.copies // workers
    unroll = min(count, MAX_UNROLL)

    def copy_some(chunk, _):
        places = []
        for u in range(unroll):
            index = (chunk * unroll + u) * workers + worker
            token = token0 + index * p.copy_tokens
            seen = (token < facts.kv_len) & (token + p.copy_tokens > facts.low)
            column = div(jnp.where(seen, token, facts.low), p.block_size)
            block = kernel.gmem["table"][piece.row, column]
            places.append((seen, block, rem(token, p.block_size), index))
        pl.when(chunk == 0)(wait)
        for seen, block, offset, index in places:
            pl.when(seen)(
                functools.partial(_copy, kernel, name, piece, block, offset, slot, index, full)
            )

            @pl.when(jnp.logical_not(seen))
            def _():
                for _ in range(p.copy_parts):
                    plgpu.barrier_arrive(full)

        return ()

    lax.fori_loop(0, count // unroll, copy_some, ())


def _copy(
    kernel: Any,
    name: str,
    piece: Any,
    block: Scalar,
    offset: Scalar,
    slot: Scalar,
    index: Scalar,
    full: Any,
) -> None:
    """Copy number `index` of a tile: a block, the part of one at `offset`, or a small one in parts."""
    p, pool = kernel.problem, kernel.gmem[name]
    layer, head = kernel.gmem["layer"][0], div(kernel.head(piece), p.head_chunks)
    if p.block_size < 8:
        per_tile = 8 // p.block_size
        parts = kernel.smem[name + "_parts"].at[slot, div(index, per_tile)]
        for c in range(p.copy_parts):
            plgpu.copy_gmem_to_smem(
                pool.at[layer, block, :, head, pl.ds(c * p.swizzle_elems, p.swizzle_elems)],
                parts.at[c, rem(index, per_tile)],
                full,
            )
        return
    if p.copy_tokens == p.block_size:
        offset = 0
    target = kernel.smem[name].at[slot, pl.ds(index * p.copy_tokens, p.copy_tokens)]
    if p.padded:
        target = target.at[:, pl.ds(0, p.head_dim)]
    plgpu.copy_gmem_to_smem(pool.at[layer, block, pl.ds(offset, p.copy_tokens), head], target, full)
