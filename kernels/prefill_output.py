"""What a computing warpgroup of the prefill kernel leaves: an item's output, or a part of a cut item.

A partial result is (maximum [64], total [64], acc [64, head_dim]) for 64 query tokens of one head: the
largest logit in units of log2, the sum of exp2(logit - maximum) and the values weighted by it, all
float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_memory import THIS_GPU, load, semaphore_signal, semaphore_wait, store
from .prefill_problem import ROWS, Kernel
from .prefill_schedule import Piece
from .schedule import Scalar, div, rem

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # one value per query, the same in all columns


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """One value everywhere: [64, columns], or [64]."""
    layout = WGMMA if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def columns(rows: jax.Array, count: int) -> jax.Array:
    """[rows] -> [rows, count]"""
    return lax.broadcast_in_dim(rows, (rows.shape[0], count), (0,))


def finite(maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 where nothing was seen: then -inf - 0 is -inf, and its exp2 is 0."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def leave_part(kernel: Kernel, piece: Piece, part) -> None:
    """Leaves the part of an item that starts in another CTA, and says so there."""
    maximum, total, acc = part
    place = kernel.part(kernel.cta)
    store(kernel.gmem["part_acc"].at[place], acc)
    store(kernel.gmem["part_stats"].at[place, 0], maximum)
    store(kernel.gmem["part_stats"].at[place, 1], total)
    if "ready" in kernel.gmem:
        # One thread signals; the barrier in commit_smem puts all threads' stores before that.
        plgpu.commit_smem()
        owner = kernel.part(kernel.cta + piece.owner)
        semaphore_signal(kernel.gmem["ready"].at[owner], **THIS_GPU)


def finish_item(kernel: Kernel, piece: Piece, part) -> None:
    """Merges the parts that other CTAs left, in their order, and writes the item's output."""
    p = kernel.problem
    if "ready" in kernel.gmem:

        @pl.when(piece.others > 0)
        def _():
            own = kernel.part(kernel.cta)
            semaphore_wait(kernel.gmem["ready"].at[own], piece.others, **THIS_GPU)

    def add_part(i, part):
        place = kernel.part(kernel.cta - 1 - i)
        maximum = load(kernel.gmem["part_stats"].at[place, 0], ROW)
        total = load(kernel.gmem["part_stats"].at[place, 1], ROW)
        acc = load(kernel.gmem["part_acc"].at[place], WGMMA)
        top = jnp.maximum(part[0], maximum)
        mine, others = jnp.exp2(part[0] - finite(top)), jnp.exp2(maximum - finite(top))
        acc = part[2] * columns(mine, p.head_dim) + acc * columns(others, p.head_dim)
        return top, part[1] * mine + total * others, acc

    maximum, total, acc = lax.fori_loop(0, piece.others, add_part, part)
    head = kernel.query_head(piece, kernel.warpgroup)
    if "sinks" in kernel.gmem:
        sink = jnp.full_like(maximum, kernel.gmem["sinks"][head])
        top = jnp.maximum(maximum, sink)
        decay = jnp.exp2(maximum - top)
        maximum, total = top, total * decay + jnp.exp2(sink - top)
        acc = acc * columns(decay, p.head_dim)
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    first = kernel.first_row(kernel.warpgroup)
    tile = piece.token_tile * (p.item_tokens // ROWS) + div(first, ROWS)
    store(kernel.gmem["lse"].at[tile, head], (maximum + jnp.log2(total)) * (1 / LOG2E))
    out = (acc * columns(inverse, p.head_dim)).astype(kernel.gmem["out"].dtype)
    q_slot = kernel.q_slot(piece, kernel.warpgroup)
    _store_output(kernel, out, q_slot, piece.first_token + first, head, piece.tokens - first)


def _store_output(
    kernel: Kernel, out: jax.Array, q_slot: Scalar, token: Scalar, head: Scalar, count: Scalar
) -> None:
    """The first `count` rows of out [64, head_dim] -> a head of as many tokens in gmem.

    Nobody waits for the copies here; `_free_q` does.
    """
    p, out_gmem = kernel.problem, kernel.gmem["out"]

    @pl.when(count >= ROWS)
    def _():
        for part in range(p.q_parts):
            first = part * p.swizzle_elems
            kernel.smem["q"].at[q_slot, part][...] = out[:, first : first + p.swizzle_elems]
        plgpu.commit_smem()
        for part in range(p.q_parts):
            part_columns = pl.ds(part * p.swizzle_elems, p.swizzle_elems)
            tokens_gmem = out_gmem.at[pl.ds(token, ROWS), head, part_columns]
            plgpu.copy_smem_to_gmem(kernel.smem["q_rows"].at[q_slot, part], tokens_gmem)

    @pl.when(count < ROWS)
    def _():
        # As few copies as a size per bit of `count` needs; the rows are in shared memory as they are.
        rows_smem = kernel.smem["out_rows"].at[q_slot]
        store(rows_smem, out)
        plgpu.commit_smem()
        for size in (32, 16, 8, 4, 2, 1):
            done = div(jnp.maximum(count, 0), 2 * size) * (2 * size)

            @pl.when((count > 0) & (rem(div(jnp.maximum(count, 0), size), 2) == 1))
            def _(size=size, done=done):
                tokens_gmem = out_gmem.at[pl.ds(token + done, size), head]
                plgpu.copy_smem_to_gmem(rows_smem.at[pl.ds(done, size)], tokens_gmem)


def blank_unused_tokens(kernel: Kernel) -> None:
    """Tokens of no row: output 0."""
    p = kernel.problem
    first = kernel.gmem["cu_q_lens"][p.num_rows]
    worker = kernel.cta * p.warpgroups + kernel.warpgroup
    workers = p.ctas * p.warpgroups
    heads = p.kv_heads * p.group
    chunks = div(jnp.maximum(p.num_tokens - first, 0) + (ROWS - 1), ROWS) * heads
    zeros = filled((ROWS, p.head_dim), 0.0).astype(kernel.gmem["out"].dtype)

    def blank(i, _):
        chunk = worker + i * workers
        token = first + div(chunk, heads) * ROWS
        count = jnp.minimum(p.num_tokens - token, ROWS)
        # All of q was used: every slot is free.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store_output(kernel, zeros, kernel.warpgroup, token, rem(chunk, heads), count)
        return ()

    lax.fori_loop(0, div(jnp.maximum(chunks - worker, 0) + (workers - 1), workers), blank, ())
