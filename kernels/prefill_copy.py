"""The copying warps of the prefill kernel: TMA copies of q, K and V into shared memory, ahead of use.

Warps 0 and 1 bring K, warps 2 and 3 bring V and q.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .decode_copy import copy_tile, drain
from .prefill_problem import ROWS, Kernel
from .prefill_schedule import Piece
from .schedule import Scalar, rem


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
    stages, empty = kernel.problem.stages[name], kernel.barriers[name + "_empty"]

    def copy_piece(piece: Piece) -> None:
        if name == "v":  # the slot is free later than the first of K's, and V is not needed so soon
            pl.when(worker == 0)(lambda: _copy_q(kernel, piece))

        def step(i, _):
            slot = kernel.slot(name, piece.tiles_before + i)

            def wait():
                @pl.when(piece.tiles_before + i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

            copy_tile(kernel, name, piece, i, slot, worker, workers, wait)
            return ()

        lax.fori_loop(0, piece.tiles, step, ())

    pieces, tiles = kernel.schedule.pieces(kernel.rank, copy_piece)
    drain(empty, tiles, stages)
    if name == "v":
        q_slots = kernel.problem.q_slots
        pl.when(worker == 0)(lambda: drain(kernel.barriers["q_empty"], pieces, q_slots))


def _copy_q(kernel: Kernel, piece: Piece) -> None:
    """Brings 64 tokens of a head for each warpgroup, whoever they belong to; and zeros past the end."""
    p = kernel.problem
    slot = rem(piece.index, p.q_slots)

    @pl.when(piece.index >= p.q_slots)
    def _():
        plgpu.barrier_wait(kernel.barriers["q_empty"].at[slot])

    for warpgroup in range(p.warpgroups):
        token = piece.first_token + kernel.first_row(warpgroup)
        # Nothing of the tile is a token of the row: then any tile will do.
        token = jnp.minimum(token, p.num_tokens - 1)
        head = kernel.query_head(piece, warpgroup)
        for part in range(p.q_parts):
            columns = pl.ds(part * p.swizzle_elems, p.swizzle_elems)
            plgpu.copy_gmem_to_smem(
                kernel.gmem["q"].at[pl.ds(token, ROWS), head, columns],
                kernel.smem["q_rows"].at[kernel.q_slot(piece, warpgroup), part],
                kernel.barriers["q_full"].at[slot],
            )
