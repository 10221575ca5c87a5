"""Who does which part of a prefill: the stretches of `schedule`, cut into pieces of items.

In a row the items are its units of query heads, each with every tile of query tokens; an item is the
tiles of KV tokens that its queries see. Under a causal mask the first token tile sees least and the
last one most. Taken in turn from both ends of the row, any two neighbours are about as long as any
other two, so that equal stretches have about equally many items, too.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .schedule import ROW, ROW_START, TOTAL, Scalar, Stretches, div, i32, rem

# What an item's start and end cost, in tiles; without it, CTAs with many small items came last. Times of
# 4,096 and 16,384 tokens on an H200 solve for 1.7 us a tile and 6 to 7 us an item.
ITEM_COST = 4


class Row(NamedTuple):
    """One row of the batch, as its lengths are read."""

    first_token: Scalar  # index of its first query token in q
    q_len: Scalar
    kv_len: Scalar
    token_tiles: Scalar  # tiles of query tokens; 0 if the row is not for this kernel


class Facts(NamedTuple):
    """What the queries of a piece may see."""

    low: Scalar  # the first KV position that any of them sees
    kv_len: Scalar


class Piece(NamedTuple):
    """Consecutive tiles of one item, all done by one CTA."""

    index: Scalar  # of this CTA's pieces
    tiles_before: Scalar  # tiles of this CTA's earlier pieces
    row: Scalar
    facts: Facts
    unit: Scalar  # of query heads
    first_token: Scalar  # index in q of the first query token
    tokens: Scalar  # query tokens, at least 1
    position: Scalar  # of the first query token in its sequence; may be negative
    token_tile: Scalar  # an index that no other token tile of the batch has
    first_tile: Scalar
    tiles: Scalar
    is_first: Scalar  # the piece starts its item: its CTA writes the output
    owner: Scalar  # how many CTAs before this one the item starts (0: here)
    others: Scalar  # how many CTAs after this one go on with the item that starts here


def _series(x: Scalar, step: int, by: int, count: Scalar) -> jax.Array:
    """The sum of (x + i * step) // by over 0 <= i < count, for x >= 0."""
    common = math.gcd(step, by)
    x, step, by = div(x, common), step // common, by // common
    total = i32(0)
    for r in range(by):  # the terms i = r, r + by, r + 2 * by ... grow by `step` each
        terms = div(jnp.maximum(count - r, 0) + (by - 1), by)
        total = total + terms * div(x + r * step, by) + step * div(terms * (terms - 1), 2)
    return total


@dataclasses.dataclass(frozen=True)
class Schedule(Stretches):
    """The stretches of a prefill; an item's length is its tiles and `ITEM_COST`."""

    units: int
    item_tokens: int
    tile_tokens: int
    causal: bool
    window: int | None
    min_query_len: int

    def row(self, index: Scalar) -> Row:
        """Reads one row's lengths."""
        first_token = self.cu_q_lens_gmem[index]
        q_len = self.cu_q_lens_gmem[index + 1] - first_token
        token_tiles = div(q_len + (self.item_tokens - 1), self.item_tokens)
        token_tiles = jnp.where(q_len >= self.min_query_len, token_tiles, 0)
        return Row(first_token, q_len, self.kv_lens_gmem[index], token_tiles)

    def tile_range(self, row: Row, token_tile: Scalar) -> tuple[jax.Array, jax.Array]:
        """[first, last) tile of KV tokens of an item; never empty: somebody writes its output."""
        if not self.causal:
            return i32(0), jnp.maximum(div(row.kv_len + self.tile_tokens - 1, self.tile_tokens), 1)
        stop = jnp.minimum((token_tile + 1) * self.item_tokens, row.q_len)
        # A row may have more queries than keys: the positions of the first ones are negative then.
        end = jnp.maximum(row.kv_len - row.q_len, 0) + stop
        last = div(end + (self.tile_tokens - 1), self.tile_tokens)
        first = div(self.low(row, token_tile), self.tile_tokens)
        is_empty = row.kv_len == 0
        return jnp.where(is_empty, 0, first), jnp.where(is_empty, 1, last)

    def low(self, row: Row, token_tile: Scalar) -> jax.Array:
        """The first KV position that a token tile sees."""
        if self.window is None:
            return i32(0)
        position = row.kv_len - row.q_len + token_tile * self.item_tokens
        return jnp.maximum(position + 1 - self.window, 0)

    def tiles(self, row: Row, token_tile: Scalar) -> jax.Array:
        """KV tiles of an item."""
        first, last = self.tile_range(row, token_tile)
        return last - first

    def tiles_up_to(self, row: Row, count: Scalar) -> jax.Array:
        """KV tiles of the items of the first `count` token tiles of one unit."""
        if not self.causal:
            return count * self.tiles(row, 0)
        # The row's last token tile may be shorter than the others.
        regular = jnp.maximum(jnp.minimum(count, row.token_tiles - 1), 0)
        before = row.kv_len - row.q_len
        end = jnp.maximum(before, 0) + self.item_tokens + self.tile_tokens - 1
        total = _series(end, self.item_tokens, self.tile_tokens, regular)
        if self.window is not None:
            low = before + 1 - self.window
            at_zero = div(jnp.maximum(-low, 0) + (self.item_tokens - 1), self.item_tokens)
            at_zero = jnp.minimum(at_zero, regular)
            low = jnp.maximum(low + at_zero * self.item_tokens, 0)
            total = total - _series(low, self.item_tokens, self.tile_tokens, regular - at_zero)
        total = total + jnp.where(count > regular, self.tiles(row, row.token_tiles - 1), 0)
        return jnp.where(row.kv_len == 0, count, total)

    def work(self, row: Scalar) -> jax.Array:
        """Length of all items of a row."""
        facts = self.row(row)
        return self.units * self.length_up_to(facts, facts.token_tiles)

    def length_up_to(self, row: Row, count: Scalar) -> jax.Array:
        """Length of the items of the first `count` token tiles of one unit."""
        return self.tiles_up_to(row, count) + ITEM_COST * count

    def _find(self, row: Row, at: Scalar) -> tuple[jax.Array, jax.Array]:
        """(item of a unit, where in the unit it starts) for place `at` of the unit."""

        def start(pairs: Scalar) -> jax.Array:
            """Where in the unit the item after so many pairs starts."""
            late = self.length_up_to(row, row.token_tiles - pairs)
            whole = self.length_up_to(row, row.token_tiles)
            return whole - late + self.length_up_to(row, pairs)

        def halve(bounds):
            low, high = bounds  # the wanted number of pairs is in [low, high)
            middle = div(low + high, 2)
            is_behind = start(middle) <= at
            return jnp.where(is_behind, middle, low), jnp.where(is_behind, high, middle)

        pairs, _ = lax.while_loop(
            lambda bounds: bounds[1] - bounds[0] > 1,
            halve,
            (i32(0), div(row.token_tiles, 2) + 1),
        )
        item, item_start = 2 * pairs, start(pairs)
        next_start = item_start + ITEM_COST + self.tiles(row, self._token_tile(row, item))
        is_behind = next_start <= at
        return (
            item + is_behind.astype(jnp.int32),
            jnp.where(is_behind, next_start, item_start),
        )

    def _token_tile(self, row: Row, item: Scalar) -> jax.Array:
        """Items alternate between the last token tiles and the first."""
        half = div(item, 2)
        return jnp.where(rem(item, 2) == 0, row.token_tiles - 1 - half, half)

    def pieces(self, rank: Scalar, body: Callable[[Piece], None]) -> tuple[jax.Array, jax.Array]:
        """Calls body(piece) for each piece of CTA `rank`; returns how many (pieces, tiles) it has."""
        total = self.plan_smem[TOTAL]
        per_cta, start = self.stretch(total, rank)
        stop = jnp.minimum(start + per_cta, total)
        is_any = start < stop
        row = jnp.where(is_any, self.plan_smem[ROW], 0)
        row_start = jnp.where(is_any, self.plan_smem[ROW_START], 0)
        facts = self.row(row)
        unit_length = jnp.maximum(self.length_up_to(facts, facts.token_tiles), 1)
        unit = div(start - row_start, unit_length)
        unit_start = row_start + unit * unit_length
        item, item_start = self._find(facts, start - unit_start)

        def step(state):
            at, row, unit, item, item_start, index, tiles_before = state
            facts = self.row(row)
            token_tile = self._token_tile(facts, item)
            first, last = self.tile_range(facts, token_tile)
            is_row = facts.token_tiles > 0
            tile0 = item_start + ITEM_COST  # where in the line the item's tiles are
            end = jnp.where(is_row, tile0 + last - first, item_start)
            skip = jnp.maximum(at - tile0, 0)
            next_at = jnp.minimum(end, stop)
            tiles = jnp.where(is_row, jnp.maximum(next_at - tile0, 0) - skip, 0)

            @pl.when(tiles > 0)
            def _():
                token = token_tile * self.item_tokens
                owner = div(tile0, per_cta)
                body(
                    Piece(
                        index=index,
                        tiles_before=tiles_before,
                        row=row,
                        facts=Facts(self.low(facts, token_tile), facts.kv_len),
                        unit=unit,
                        first_token=facts.first_token + token,
                        tokens=jnp.minimum(facts.q_len - token, self.item_tokens),
                        position=facts.kv_len - facts.q_len + token,
                        token_tile=div(facts.first_token, self.item_tokens) + row + token_tile,
                        first_tile=first + skip,
                        tiles=tiles,
                        is_first=skip == 0,
                        owner=rank - owner,
                        others=div(end - 1, per_cta) - owner,
                    )
                )

            is_done = next_at >= end
            item_start = jnp.where(is_done, next_at, item_start)
            item = jnp.where(is_done, item + 1, item)
            unit_done = item >= facts.token_tiles
            item, unit = jnp.where(unit_done, 0, item), jnp.where(unit_done, unit + 1, unit)
            row_done = (unit >= self.units) | jnp.logical_not(is_row)
            unit, row = jnp.where(row_done, 0, unit), jnp.where(row_done, row + 1, row)
            index = index + (tiles > 0).astype(jnp.int32)
            return next_at, row, unit, item, item_start, index, tiles_before + tiles

        state = (start, row, unit, item, unit_start + item_start, i32(0), i32(0))
        *_, count, tiles = lax.while_loop(lambda state: state[0] < stop, step, state)
        return count, tiles
