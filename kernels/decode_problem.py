"""One decode call of the Mosaic GPU kernel: its static sizes, its options, and the refs it works on."""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from .decode_schedule import Piece, Schedule
from .hopper import PoolTiles
from .schedule import div, rem

# A Hopper SM has 227 KiB for a CTA. The scratch of a reduction over four warps is what 8 columns need
# at once; barriers and the plan take the rest.
SMEM_BYTES = 224 * 1024
REDUCTION_SCRATCH_BYTES = 1024
H200_SMS = 132


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen freely; None is the choice of `Problem`.

    Attributes:
      tile_tokens: KV tokens per step, a multiple of 64.
      stages: tiles in flight or in use, at least 2.
      ctas: CTAs of the grid; None is one per SM.
      concurrent_ctas: whether CTAs run at the same time. False where they run one after another, as
        in an interpreter: a CTA then finds the others' partial results without waiting for them.
    """

    tile_tokens: int | None = None
    stages: int | None = None
    ctas: int | None = None
    concurrent_ctas: bool = True


@dataclasses.dataclass(frozen=True)
class Problem(PoolTiles):
    """The static sizes of a call, and every decision that follows from them.

    Queries are columns: `token_columns` query tokens, times `head_columns` query heads of a KV head.
    A group of more heads than fit is split into `head_chunks`, more tokens than fit into
    `token_groups`.
    """

    num_rows: int
    num_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    max_query_len: int
    itemsize: int
    tuning: Tuning

    def __post_init__(self):
        tile, copy = self.tile_tokens, self.copy_tokens
        if tile % 64 or tile % copy:
            raise ValueError(
                f"tile_tokens={tile} must be a multiple of 64 and of {copy}, a TMA copy"
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} of {tile} tokens: at least 2 must fit")

    @property
    def padded_dim(self) -> int:
        """head_dim as the rows of the product V^T P^T, which come in 64s."""
        return pl.cdiv(self.head_dim, 64) * 64

    @property
    def padded(self) -> bool:
        """Whether shared memory has columns that hold no element of a head."""
        return self.head_dim != self.padded_dim

    @property
    def max_columns(self) -> int:
        """Accumulator and product of a tile may take 144 of a thread's 255 registers."""
        return min(64, 144 * 128 // (2 * self.padded_dim) // 8 * 8)

    @property
    def head_chunks(self) -> int:
        """Parts of a group."""
        return pl.cdiv(self.group, self.max_columns)

    @property
    def chunk_heads(self) -> int:
        """Query heads in a part."""
        return pl.cdiv(self.group, self.head_chunks)

    @property
    def heads(self) -> int:
        """KV heads, counted once for each part of their group."""
        return self.kv_heads * self.head_chunks

    @property
    def head_columns(self) -> int:
        """Columns per query token: chunk_heads, padded to 8s."""
        return pl.cdiv(self.chunk_heads, 8) * 8

    @property
    def token_groups(self) -> int:
        """Parts of a row's query tokens."""
        return pl.cdiv(self.max_query_len, max(1, self.max_columns // self.head_columns))

    @property
    def token_columns(self) -> int:
        """Query tokens in a part."""
        return pl.cdiv(self.max_query_len, self.token_groups)

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return self.token_columns * self.head_columns

    @property
    def shared_columns(self) -> bool:
        """Whether 8 query heads in their own order are columns for several KV heads: no padding."""
        return 8 % self.group == 0 and self.kv_heads * self.group % 8 == 0

    @property
    def side_by_side(self) -> bool:
        """High and low part of P as columns of one product, as long as that fits in registers."""
        return self.padded_dim * self.columns <= 4096

    @property
    def tile_tokens(self) -> int:
        """Tokens per step: 32 KiB each of K and V, and at most 32 logits per thread.

        A step of half the bytes took 65 % of the time: barriers and reductions cost the same. With
        tiles of 64 tokens the 4.34 TB/s of head_dim 128 were 4.15; with 128, the 3.6 of 64 were 3.3.
        """
        if self.tuning.tile_tokens is not None:
            return self.tuning.tile_tokens
        tokens = min(32 * 1024 // (self.padded_dim * self.itemsize), 32 * 128 // self.columns, 256)
        return max(64, 1 << (tokens.bit_length() - 1))

    @property
    def stages(self) -> int:
        """Tiles that fit in shared memory; bytes in flight are what hides the memory's latency."""
        if self.tuning.stages is not None:
            return self.tuning.stages
        p_or_out = max(2 * self.columns * self.tile_tokens, self.columns * self.padded_dim)
        fixed = (2 * self.columns * self.head_dim + p_or_out) * self.itemsize
        return (SMEM_BYTES - fixed) // (2 * self.tile_tokens * self.padded_dim * self.itemsize)

    @property
    def lanes(self) -> int:
        """KV heads that neighbouring CTAs work on side by side.

        The heads of a token are neighbours in memory: read together they came 2 to 5 % faster than
        one after another. Used where nearly every SM still has work.
        """
        sms = self.tuning.ctas or H200_SMS
        fit = [
            n for n in range(1, self.heads + 1) if self.heads % n == 0 and sms // n * n >= 0.9 * sms
        ]
        return max(fit, default=1)

    @property
    def ctas(self) -> int:
        """CTAs of the grid, a multiple of `lanes`."""
        return (self.tuning.ctas or H200_SMS) // self.lanes * self.lanes

    @property
    def copy_tokens(self) -> int:
        """Tokens per TMA copy: a block or a tile; 8 where padding interrupts shared memory."""
        if self.block_size < 8:
            return self.block_size
        return 8 if self.padded else min(self.block_size, self.tile_tokens)


@dataclasses.dataclass(frozen=True)
class Options:
    """What happens to the logits; sinks and slopes are operands."""

    scale: float
    soft_cap: float | None
    window: int | None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel while it is traced: sizes, the share of this CTA, and the refs by name.

    cta: index in the grid.
    gmem: q, k, v, layer, table, kv_lens, cu_q_lens, sinks and slopes if given, out, lse; part_acc and
      part_stats, the partial results of each CTA; ready, their semaphores, if CTAs are concurrent.
    smem: q, k, v, p, out, plan; k_parts and v_parts, the same bytes as k and v, for small blocks.
    barriers: q_full, q_empty, k_full, v_full, empty, summed, planned.
    """

    problem: Problem
    options: Options
    schedule: Schedule
    cta: jax.Array
    gmem: dict[str, Any]
    smem: dict[str, Any]
    barriers: dict[str, Any]

    @property
    def rank(self) -> jax.Array:
        """Place in the order of the work, from the last CTA of the grid to the first.

        A CTA waits only for those of higher rank. They have smaller indices, so the hardware starts
        them first, and no wait can last for ever, however few CTAs run at once.
        """
        return self.schedule.ctas - 1 - div(self.cta, self.problem.lanes)

    def head(self, piece: Piece) -> jax.Array:
        """The piece's KV head, counted as in Problem.heads."""
        return piece.head * self.problem.lanes + rem(self.cta, self.problem.lanes)

    def query_rows(self, piece: Piece) -> tuple[jax.Array, jax.Array | int]:
        """(first of the rows of q that are the piece's columns, its first own column)."""
        p, head = self.problem, self.head(piece)
        if not p.shared_columns:
            return head * p.head_columns, 0
        first = head * p.group
        return div(first, 8) * 8, rem(first, 8)

    def slot(self, piece: Piece, tile: Any) -> jax.Array:
        """Where in the ring of stages the piece's tile is."""
        return rem(piece.tiles_before + tile, self.problem.stages)
