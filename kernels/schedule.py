"""Equal stretches of a call's work for all CTAs: finding the row in which each begins.

The work of a call is a line, measured in tiles: the rows of the batch one after another, and in each
row its items. Each CTA gets an equal stretch of that line, whatever the lengths are, and an item is
cut only where a stretch ends. Nothing is planned on the host, and lengths are data: a change in them
compiles nothing. ("Stream-K", Osama et al., 2023, arXiv:2301.03598, for attention.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Scalar = Any  # a Python int or a traced int32
PLAN_WORDS = 8  # int32 words of shared memory that plan() fills
TOTAL, ROW, ROW_START = 4, 5, 6  # words 0..3: the work in each quarter of the rows
_WARPS = 4
_UNROLL = 8  # rows whose lengths are in flight at once in each warp


def i32(x: Scalar) -> jax.Array:
    """X as an int32 array."""
    return jnp.asarray(x, jnp.int32)


def div(x: Scalar, y: Scalar) -> jax.Array:
    """x // y of non-negative int32."""
    return lax.div(i32(x), i32(y))


def rem(x: Scalar, y: Scalar) -> jax.Array:
    """x % y of non-negative int32."""
    return lax.rem(i32(x), i32(y))


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Static sizes and the refs that hold the lengths."""

    num_rows: int
    ctas: int
    kv_lens_gmem: Any
    cu_q_lens_gmem: Any
    plan_smem: Any

    def work(self, row: Scalar) -> jax.Array:
        """Tiles of all items of a row."""
        raise NotImplementedError

    def stretch(self, total: Scalar, rank: Scalar) -> tuple[jax.Array, jax.Array]:
        """(tiles per CTA, first tile of CTA `rank`)."""
        per_cta = div(total + (self.ctas - 1), self.ctas)
        return per_cta, rank * per_cta

    def plan(self, warp: Scalar, rank: Scalar, summed: Any, planned: Any) -> None:
        """Finds the row in which CTA `rank` starts; run by the four warps of a warpgroup.

        One thread that walked over all rows took 60 ns a row, 8 us of 135 at 128 rows. So each warp
        adds up a quarter of them, and the one whose quarter holds the start looks for it there.

        Args:
          warp: which of the four this is.
          rank: the CTA's place in the order of the work.
          summed: a barrier of 4 arrivals.
          planned: a barrier of 4 arrivals; whoever waited for it may read the plan.
        """
        quarter = pl.cdiv(self.num_rows, _WARPS)
        begin, stop = warp * quarter, jnp.minimum((warp + 1) * quarter, self.num_rows)
        chunks = div(jnp.maximum(stop - begin, 0), _UNROLL)

        def works(first: Scalar, count: int) -> list[jax.Array]:
            return [self.work(first + i) for i in range(count)]

        work = lax.fori_loop(
            0, chunks, lambda c, acc: acc + sum(works(begin + c * _UNROLL, _UNROLL)), i32(0)
        )
        work = lax.fori_loop(
            begin + chunks * _UNROLL, stop, lambda row, acc: acc + self.work(row), work
        )
        self.plan_smem[warp] = work
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        before, total = i32(0), i32(0)
        for i in range(_WARPS):
            before = before + jnp.where(i < warp, self.plan_smem[i], 0)
            total = total + self.plan_smem[i]
        start = self.stretch(total, rank)[1]

        @pl.when(warp == 0)
        def _():
            self.plan_smem[TOTAL] = total

        @pl.when((before <= start) & (start < before + work))
        def _():
            def skip(carry):
                """Passes the rows of a whole chunk that end before the start."""
                row, row_start, _ = carry
                end, skipped = row_start, i32(0)
                for row_work in works(row, _UNROLL):
                    end = end + row_work
                    skipped = skipped + (end <= start).astype(jnp.int32)
                    row_start = jnp.where(end <= start, end, row_start)
                return row + skipped, row_start, skipped == _UNROLL

            def skip_one(carry):
                row, row_start, _ = carry
                end = row_start + self.work(row)
                behind = end <= start
                return row + behind.astype(jnp.int32), jnp.where(behind, end, row_start), behind

            row, row_start, _ = lax.while_loop(
                lambda carry: carry[2] & (carry[0] + _UNROLL <= stop), skip, (begin, before, True)
            )
            row, row_start, _ = lax.while_loop(
                lambda carry: carry[2], skip_one, (row, row_start, True)
            )
            self.plan_smem[ROW] = row
            self.plan_smem[ROW_START] = row_start

        plgpu.barrier_arrive(planned)
        plgpu.barrier_wait(planned)
