"""Who does which part of a decode step: the work shared out over CTAs on the device, by tiles.

The work of a call is a line: the rows of the batch, in a row its items (a KV head with a group of
query tokens), in an item its tiles of KV tokens. Each CTA gets an equal stretch of that line, whatever
the lengths are, and an item is cut only where a stretch ends. Nothing is planned on the host, and
lengths are data: a change in them compiles nothing. ("Stream-K", Osama et al., 2023,
arXiv:2301.03598, for attention.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Scalar = Any  # a Python int or a traced int32
PLAN_WORDS = 8  # int32 words of shared memory that plan() fills
_TOTAL, _ROW, _ROW_START = 4, 5, 6  # words 0..3: the work in each quarter of the rows
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


class Row(NamedTuple):
    """One row of the batch."""

    first_token: Scalar  # index of its first query token in q
    q_len: Scalar
    kv_len: Scalar
    low: Scalar  # the first KV position that any of its queries sees
    first_tile: Scalar  # the tile that holds `low`
    tiles: (
        Scalar  # tiles per item, at least 1 if there is a query, so that somebody writes its output
    )


class Piece(NamedTuple):
    """Consecutive tiles of one item, all done by one CTA."""

    index: Scalar  # of this CTA's pieces
    tiles_before: Scalar  # tiles of this CTA's earlier pieces
    row: Scalar
    facts: Row
    head: Scalar  # KV head (or part of one, when a group is too big for one tile)
    token_group: Scalar
    first_tile: Scalar
    tiles: Scalar
    is_first: Scalar  # the piece starts its item: its CTA writes the output
    owner: Scalar  # how many CTAs before this one the item starts (0: here)
    others: Scalar  # how many CTAs after this one go on with the item that starts here


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Static sizes and the refs that hold the lengths."""

    num_rows: int
    heads: int
    token_groups: int
    tile_tokens: int
    window: int | None
    ctas: int
    kv_lens_gmem: Any
    cu_q_lens_gmem: Any
    plan_smem: Any

    def row(self, index: Scalar) -> Row:
        """Reads one row's lengths."""
        first_token = self.cu_q_lens_gmem[index]
        q_len = self.cu_q_lens_gmem[index + 1] - first_token
        kv_len = self.kv_lens_gmem[index]
        low = i32(0) if self.window is None else jnp.maximum(kv_len - q_len + 1 - self.window, 0)
        first_tile = div(low, self.tile_tokens)
        tiles = jnp.maximum(div(kv_len + self.tile_tokens - 1, self.tile_tokens) - first_tile, 1)
        return Row(first_token, q_len, kv_len, low, first_tile, jnp.where(q_len > 0, tiles, 0))

    def _stretch(self, total: Scalar, rank: Scalar) -> tuple[jax.Array, jax.Array]:
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
          planned: a barrier of 4 arrivals; whoever waited for it may call `pieces`.
        """
        quarter = pl.cdiv(self.num_rows, _WARPS)
        begin, stop = warp * quarter, jnp.minimum((warp + 1) * quarter, self.num_rows)
        chunks = div(jnp.maximum(stop - begin, 0), _UNROLL)
        per_tile = self.heads * self.token_groups

        def tiles(first: Scalar, count: int) -> list[jax.Array]:
            return [self.row(first + i).tiles for i in range(count)]

        work = lax.fori_loop(
            0, chunks, lambda c, acc: acc + sum(tiles(begin + c * _UNROLL, _UNROLL)), i32(0)
        )
        work = lax.fori_loop(
            begin + chunks * _UNROLL, stop, lambda row, acc: acc + self.row(row).tiles, work
        )
        work = work * per_tile
        self.plan_smem[warp] = work
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        before, total = i32(0), i32(0)
        for i in range(_WARPS):
            before = before + jnp.where(i < warp, self.plan_smem[i], 0)
            total = total + self.plan_smem[i]
        start = self._stretch(total, rank)[1]

        @pl.when(warp == 0)
        def _():
            self.plan_smem[_TOTAL] = total

        @pl.when((before <= start) & (start < before + work))
        def _():
            def skip(carry):
                """Passes the rows of a whole chunk that end before the start."""
                row, row_start, _ = carry
                end, skipped = row_start, i32(0)
                for row_tiles in tiles(row, _UNROLL):
                    end = end + row_tiles * per_tile
                    skipped = skipped + (end <= start).astype(jnp.int32)
                    row_start = jnp.where(end <= start, end, row_start)
                return row + skipped, row_start, skipped == _UNROLL

            def skip_one(carry):
                row, row_start, _ = carry
                end = row_start + self.row(row).tiles * per_tile
                behind = end <= start
                return row + behind.astype(jnp.int32), jnp.where(behind, end, row_start), behind

            row, row_start, _ = lax.while_loop(
                lambda carry: carry[2] & (carry[0] + _UNROLL <= stop), skip, (begin, before, True)
            )
            row, row_start, _ = lax.while_loop(
                lambda carry: carry[2], skip_one, (row, row_start, True)
            )
            self.plan_smem[_ROW] = row
            self.plan_smem[_ROW_START] = row_start

        plgpu.barrier_arrive(planned)
        plgpu.barrier_wait(planned)

    def pieces(self, rank: Scalar, body: Callable[[Piece], None]) -> tuple[jax.Array, jax.Array]:
        """Calls body(piece) for each piece of CTA `rank`; returns how many (pieces, tiles) it has."""
        total = self.plan_smem[_TOTAL]
        per_cta, start = self._stretch(total, rank)
        stop = jnp.minimum(start + per_cta, total)

        def step(carry):
            at, row, row_start, index, tiles_before = carry
            facts = self.row(row)
            item_tiles = jnp.maximum(facts.tiles, 1)
            item = div(at - row_start, item_tiles)
            item_start = row_start + item * item_tiles
            skip = at - item_start
            tiles = jnp.where(facts.tiles > 0, jnp.minimum(item_tiles - skip, stop - at), 0)

            @pl.when(tiles > 0)
            def _():
                body(
                    Piece(
                        index=index,
                        tiles_before=tiles_before,
                        row=row,
                        facts=facts,
                        head=div(item, self.token_groups),
                        token_group=rem(item, self.token_groups),
                        first_tile=facts.first_tile + skip,
                        tiles=tiles,
                        is_first=skip == 0,
                        owner=rank - div(item_start, per_cta),
                        others=div(item_start + item_tiles - 1, per_cta) - rank,
                    )
                )

            at = at + tiles
            row_end = row_start + facts.tiles * (self.heads * self.token_groups)
            done = at >= row_end
            return (
                at,
                jnp.where(done, row + 1, row),
                jnp.where(done, row_end, row_start),
                index + (tiles > 0).astype(jnp.int32),
                tiles_before + tiles,
            )

        carry = (start, self.plan_smem[_ROW], self.plan_smem[_ROW_START], i32(0), i32(0))
        *_, count, tiles = lax.while_loop(lambda carry: carry[0] < stop, step, carry)
        return count, tiles
