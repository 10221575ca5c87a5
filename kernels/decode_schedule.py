"""Who does which part of a decode step: the stretches of `schedule`, cut into pieces of items.

In a row the items are its KV heads, each with every group of query tokens; an item is its tiles of KV
tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .schedule import ROW, ROW_START, TOTAL, Scalar, Stretches, div, i32, rem


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
class Schedule(Stretches):
    """The stretches of a decode step."""

    heads: int
    token_groups: int
    tile_tokens: int
    window: int | None

    def work(self, row: Scalar) -> jax.Array:
        """Tiles of all items of a row."""
        return self.row(row).tiles * (self.heads * self.token_groups)

    def row(self, index: Scalar) -> Row:
        """Reads one row's lengths."""
        first_token = self.cu_q_lens_gmem[index]
        q_len = self.cu_q_lens_gmem[index + 1] - first_token
        kv_len = self.kv_lens_gmem[index]
        low = i32(0) if self.window is None else jnp.maximum(kv_len - q_len + 1 - self.window, 0)
        first_tile = div(low, self.tile_tokens)
        tiles = jnp.maximum(div(kv_len + self.tile_tokens - 1, self.tile_tokens) - first_tile, 1)
        return Row(first_token, q_len, kv_len, low, first_tile, jnp.where(q_len > 0, tiles, 0))

    def pieces(self, rank: Scalar, body: Callable[[Piece], None]) -> tuple[jax.Array, jax.Array]:
        """Calls body(piece) for each piece of CTA `rank`; returns how many (pieces, tiles) it has."""
        total = self.plan_smem[TOTAL]
        per_cta, start = self.stretch(total, rank)
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

        carry = (start, self.plan_smem[ROW], self.plan_smem[ROW_START], i32(0), i32(0))
        *_, count, tiles = lax.while_loop(lambda carry: carry[0] < stop, step, carry)
        return count, tiles
