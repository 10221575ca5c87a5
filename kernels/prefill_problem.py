"""One prefill call of the Mosaic GPU kernel: its static sizes, its options, and the refs it works on."""

import dataclasses
from typing import Any

import jax

from .decode_problem import H200_SMS, SMEM_BYTES
from .hopper import PoolTiles
from .prefill_schedule import Piece, Schedule
from .schedule import Scalar, div, rem

ROWS = 64  # query tokens of a warpgroup: the rows of a wgmma


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen freely; None is the choice of `Problem`.

    Attributes:
      warpgroups: warpgroups that compute, each 64 query tokens of one head.
      tile_tokens: KV tokens per step, a multiple of 64.
      k_stages, v_stages: tiles of K and of V in shared memory.
      q_slots: items whose queries are in shared memory.
      take_turns: whether the warpgroups issue their products in turn, so that one computes its
        softmax while the other's products run.
      ctas: CTAs of the grid; None is one per SM.
      interpreted: for JAX's interpreter, which runs one CTA after another, knows no product that takes
        P from registers, and no second view of the same shared memory.
    """

    warpgroups: int | None = None
    tile_tokens: int | None = None
    k_stages: int | None = None
    v_stages: int | None = None
    q_slots: int | None = None
    take_turns: bool | None = None
    ctas: int | None = None
    interpreted: bool = False


@dataclasses.dataclass(frozen=True)
class Problem(PoolTiles):
    """The static sizes of a call, and every decision that follows from them.

    An item is `item_heads` query heads of a KV head times `item_tokens` query tokens, so that each
    of its warpgroups has 64 tokens of one head, and all of them use the same K and V.
    """

    num_rows: int
    num_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    itemsize: int
    tuning: Tuning

    # A tile is copied as in the decode kernel; these are what differs there.
    padded = False
    head_chunks = 1

    def __post_init__(self):
        if self.tile_tokens % 64 or self.tile_tokens % self.copy_tokens:
            raise ValueError(
                f"tile_tokens={self.tile_tokens} must be a multiple of 64 and of "
                f"{self.copy_tokens}, a TMA copy"
            )
        if min(self.stages.values()) < 1 or self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"stages={self.stages} of {self.tile_tokens} tokens and q_slots={self.q_slots} "
                f"take {self.smem_bytes} bytes of {SMEM_BYTES}"
            )

    @property
    def q_parts(self) -> int:
        """Parts of a head, each as wide as the swizzle."""
        return self.head_dim // self.swizzle_elems

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute: as many as their registers and shared memory allow."""
        return self.tuning.warpgroups or (3 if self.head_dim <= 64 else 2)

    @property
    def item_heads(self) -> int:
        """Query heads of an item."""
        return self.warpgroups if self.group % self.warpgroups == 0 else 1

    @property
    def item_tokens(self) -> int:
        """Query tokens of an item."""
        return ROWS * (self.warpgroups // self.item_heads)

    @property
    def units(self) -> int:
        """Parts of the query heads that make items."""
        return self.kv_heads * self.group // self.item_heads

    @property
    def token_tiles(self) -> int:
        """A bound of `Piece.token_tile`."""
        return self.num_tokens // self.item_tokens + self.num_rows

    @property
    def tile_tokens(self) -> int:
        """KV tokens per step: what logits and accumulator leave room for in a thread's registers."""
        if self.tuning.tile_tokens is not None:
            return self.tuning.tile_tokens
        return 128 if self.head_dim <= 128 else 64

    @property
    def q_slots(self) -> int:
        """With two, the next item's queries are there when its turn comes."""
        if self.tuning.q_slots is not None:
            return self.tuning.q_slots
        return 2 if self.head_dim <= 128 else 1

    @property
    def take_turns(self) -> bool:
        """Not at head_dim 64: exponentials take as long as products there, and it was 3 % slower."""
        return self.head_dim > 64 if self.tuning.take_turns is None else self.tuning.take_turns

    @property
    def q_bytes(self) -> int:
        """Shared memory for queries."""
        return self.q_slots * self.warpgroups * ROWS * self.head_dim * self.itemsize

    @property
    def tile_bytes(self) -> int:
        """Shared memory for a tile of K or of V."""
        return self.tile_tokens * self.head_dim * self.itemsize

    @property
    def stages(self) -> dict[str, int]:
        """Tiles of K and of V that fit in shared memory, at most 4.

        V's slots are free later than K's, so an odd tile is V's.
        """
        tiles = (SMEM_BYTES - self.q_bytes) // self.tile_bytes
        k = self.tuning.k_stages or min(4, tiles // 2)
        return dict(k=k, v=self.tuning.v_stages or min(4, tiles - k))

    @property
    def smem_bytes(self) -> int:
        """Shared memory but for barriers and the plan."""
        return self.q_bytes + sum(self.stages.values()) * self.tile_bytes

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return self.tuning.ctas or H200_SMS

    @property
    def copy_tokens(self) -> int:
        """Tokens per TMA copy: a block or a tile."""
        return min(self.block_size, self.tile_tokens)


@dataclasses.dataclass(frozen=True)
class Options:
    """Who sees whom, and what happens to the logits; sinks and slopes are operands."""

    scale: float
    soft_cap: float | None
    window: int | None
    causal: bool
    min_query_len: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel while it is traced: sizes, the share of this CTA, and the refs by name.

    cta, warpgroup: where this thread is.
    gmem: q, k, v, layer, table, kv_lens, cu_q_lens, sinks and slopes if given, out, lse; part_acc and
      part_stats, the partial results of each CTA; ready, their semaphores, if CTAs are concurrent.
    smem: q, k, v, plan; q_rows and out_rows, the same bytes as q; k_parts and v_parts, the same bytes
      as k and v, for small blocks; p if it is not in registers.
    barriers: q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, blanked, summed, planned.
    """

    problem: Problem
    options: Options
    schedule: Schedule
    cta: jax.Array
    warpgroup: jax.Array
    gmem: dict[str, Any]
    smem: dict[str, Any]
    barriers: dict[str, Any]

    @property
    def rank(self) -> jax.Array:
        """Place in the order of the work, from the last CTA of the grid to the first.

        A CTA waits only for those of higher rank. They have smaller indices, so the hardware starts
        them first, and no wait can last for ever, however few CTAs run at once.
        """
        return self.problem.ctas - 1 - self.cta

    def head(self, piece: Piece) -> jax.Array:
        """The piece's KV head."""
        return div(piece.unit * self.problem.item_heads, self.problem.group)

    def part(self, cta: Scalar) -> jax.Array:
        """Where a CTA leaves this warpgroup's part of an item that another one started."""
        return cta * self.problem.warpgroups + self.warpgroup

    def query_head(self, piece: Piece, warpgroup: Scalar) -> jax.Array:
        """The query head of a warpgroup."""
        heads = self.problem.item_heads
        return piece.unit * heads + rem(warpgroup, heads)

    def first_row(self, warpgroup: Scalar) -> jax.Array:
        """The first of a warpgroup's 64 query tokens, counted from the item's first."""
        return ROWS * div(warpgroup, self.problem.item_heads)

    def q_slot(self, piece: Piece, warpgroup: Scalar) -> jax.Array:
        """Where a warpgroup's queries are."""
        slots, warpgroups = self.problem.q_slots, self.problem.warpgroups
        return rem(piece.index, slots) * warpgroups + warpgroup

    def slot(self, name: str, tile: Scalar) -> jax.Array:
        """Where in the ring of K or V a tile is, counted over all of the CTA's pieces."""
        return rem(tile, self.problem.stages[name])
