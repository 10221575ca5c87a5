"""The computing warpgroup of the decode kernel: a running softmax over tiles, and the merge of cut items.

A partial result is (maximum [columns], total [columns], acc [padded_dim, columns]): the largest logit,
the sum of exp2(logit - maximum) and the values weighted by it, all float32, logits in units of log2.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .decode_problem import Kernel
from .decode_schedule import Piece
from .gpu_memory import THIS_GPU, load, semaphore_signal, semaphore_wait, store
from .schedule import Scalar, div, rem

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
COLUMNS = WGMMA.reduce(0)  # one value per query column, the same in all rows


def _transposed(ref):
    return ref.transpose((1, 0))


def _store_transposed(ref, value: jax.Array) -> None:
    """ref[...] = value.T of 16-bit values."""
    store(_transposed(ref), plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED))


def _filled(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = WGMMA if len(shape) == 2 else COLUMNS
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _rows(columns: jax.Array, count: int) -> jax.Array:
    """[columns] -> [count, columns]"""
    return lax.broadcast_in_dim(columns, (count, columns.shape[0]), (1,))


def _finite(maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 where nothing was seen: then -inf - 0 is -inf, and its exp2 is 0."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _merge(a, b):
    """Joins two partial results."""
    maximum = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp2(a[0] - _finite(maximum)), jnp.exp2(b[0] - _finite(maximum))
    rows = a[2].shape[0]
    return maximum, a[1] * wa + b[1] * wb, a[2] * _rows(wa, rows) + b[2] * _rows(wb, rows)


def compute_warpgroup(kernel: Kernel) -> None:
    """All that the computing warpgroup does."""
    plgpu.barrier_wait(kernel.barriers["planned"])
    kernel.schedule.pieces(kernel.rank, functools.partial(_compute_piece, kernel))
    _blank_unused_tokens(kernel)


def _compute_piece(kernel: Kernel, piece: Piece) -> None:
    p, barriers = kernel.problem, kernel.barriers
    q_slot = rem(piece.index, 2)
    logits_acc = plgpu.WGMMAAccumulatorRef((p.tile_tokens, p.columns), jnp.float32)
    plgpu.barrier_wait(barriers["q_full"].at[q_slot])
    plgpu.barrier_wait(barriers["k_full"].at[kernel.slot(piece, 0)])

    def first_logits(acc):
        _multiply_q(kernel, acc, kernel.slot(piece, 0), q_slot)
        return acc[...]

    carry = (
        _filled((p.columns,), -jnp.inf),
        _filled((64, p.columns), 0.0),  # totals of every 64th token: added up once, at the end
        _filled((p.padded_dim, p.columns), 0.0),
        pl.run_scoped(first_logits, logits_acc),
    )
    step = functools.partial(_compute_tile, kernel, piece, q_slot)
    carry = lax.fori_loop(0, piece.tiles - 1, functools.partial(step, is_last=False), carry)
    maximum, totals, acc, _ = step(piece.tiles - 1, carry, is_last=True)
    plgpu.barrier_arrive(barriers["q_empty"].at[q_slot])
    part = maximum, jnp.sum(totals, axis=0), acc
    pl.when(piece.is_first)(lambda: _finish_item(kernel, piece, part))
    pl.when(jnp.logical_not(piece.is_first))(lambda: _leave_part(kernel, piece, part))


def _compute_tile(kernel: Kernel, piece: Piece, q_slot: Scalar, tile: Scalar, carry, is_last: bool):
    """One step: softmax of this tile's logits, then its values and the next tile's logits."""
    p, barriers = kernel.problem, kernel.barriers
    maximum, totals, acc, logits = carry
    slot, next_slot = kernel.slot(piece, tile), kernel.slot(piece, tile + 1)
    token0 = (piece.first_tile + tile) * p.tile_tokens
    # Is there a token in the tile that some query does not see?
    edge = token0 + p.tile_tokens > piece.facts.kv_len - piece.facts.q_len + 1
    if kernel.options.window is not None:
        edge = edge | (token0 < piece.facts.kv_len - kernel.options.window)

    logits = _finish_logits(kernel, piece, token0, edge, logits)
    new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=0))
    decay = jnp.exp2(maximum - _finite(new_maximum))
    weights = jnp.exp2(logits - _rows(_finite(new_maximum), p.tile_tokens))
    high = weights.astype(kernel.smem["v"].dtype)
    low = (weights - high.astype(jnp.float32)).astype(high.dtype)
    _store_transposed(kernel.smem["p"].at[pl.ds(0, p.columns)], high)
    _store_transposed(kernel.smem["p"].at[pl.ds(p.columns, p.columns)], low)
    totals = totals * _rows(decay, 64)
    for r in range(0, p.tile_tokens, 64):
        totals = totals + weights[r : r + 64]

    plgpu.barrier_wait(barriers["v_full"].at[slot])
    pl.when(edge)(lambda: _blank_dead_values(kernel, piece, token0, slot))
    plgpu.commit_smem()
    product_acc = plgpu.WGMMAAccumulatorRef(
        (p.padded_dim, p.columns * (1 + p.side_by_side)), jnp.float32
    )

    def multiply_last(product_acc):
        _multiply_v(kernel, product_acc, slot)
        return product_acc[...], ()

    def multiply(product_acc, logits_acc):
        _multiply_v(kernel, product_acc, slot)
        _multiply_q(kernel, logits_acc, next_slot, q_slot)
        return product_acc[...], logits_acc[...]

    if is_last:
        product, logits = pl.run_scoped(multiply_last, product_acc)
    else:
        plgpu.barrier_wait(barriers["k_full"].at[next_slot])
        logits_acc = plgpu.WGMMAAccumulatorRef((p.tile_tokens, p.columns), jnp.float32)
        product, logits = pl.run_scoped(multiply, product_acc, logits_acc)
    plgpu.barrier_arrive(barriers["empty"].at[slot])
    if p.side_by_side:
        product = product[:, : p.columns] + product[:, p.columns :]
    return new_maximum, totals, acc * _rows(decay, p.padded_dim) + product, logits


def _multiply_q(kernel: Kernel, acc, slot: Scalar, q_slot: Scalar) -> None:
    """acc [tile_tokens, columns] += K Q^T"""
    k_smem = kernel.smem["k"].at[slot]
    if kernel.problem.padded:
        k_smem = k_smem.at[:, pl.ds(0, kernel.problem.head_dim)]
    plgpu.wgmma(acc, k_smem, _transposed(kernel.smem["q"].at[q_slot]))


def _multiply_v(kernel: Kernel, acc, slot: Scalar) -> None:
    """acc [padded_dim, columns or 2 * columns] += V^T P^T"""
    p = kernel.problem
    v_smem, p_smem = _transposed(kernel.smem["v"].at[slot]), kernel.smem["p"]
    if p.side_by_side:
        plgpu.wgmma(acc, v_smem, _transposed(p_smem.at[:, :]))
    else:
        for part in range(2):
            rows = p_smem.at[pl.ds(part * p.columns, p.columns)]
            plgpu.wgmma(acc, v_smem, _transposed(rows))


def _finish_logits(
    kernel: Kernel, piece: Piece, token0: Scalar, edge: jax.Array, logits: jax.Array
):
    """Scale, soft cap, ALiBi and masks. Returns the logits in units of log2."""
    p, options = kernel.problem, kernel.options
    if options.soft_cap is None:
        logits = logits * (options.scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own tanh has 11 bits.
        power = jnp.exp2(logits * (2 * LOG2E * options.scale / options.soft_cap))
        logits = (options.soft_cap * LOG2E) * (1.0 - 2.0 / (power + 1.0))

    def distance() -> jax.Array:
        """Position of the key minus that of the query."""
        first_query = piece.facts.kv_len - piece.facts.q_len + piece.token_group * p.token_columns
        shape = (p.tile_tokens, p.columns)
        keys = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + (token0 - first_query)
        if p.token_columns == 1:
            return keys
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        return keys - lax.div(columns, jnp.full_like(columns, p.head_columns))

    def mask(x: jax.Array) -> jax.Array:
        d = distance()
        seen = d <= 0
        if options.window is not None:
            seen = seen & (d > -options.window)
        return jnp.where(seen, x, -jnp.inf)

    if "slopes" in kernel.gmem:
        slopes = load(kernel.gmem["slopes"].at[kernel.head(piece)], COLUMNS)
        logits = logits + _rows(slopes, p.tile_tokens) * distance().astype(jnp.float32)
    return lax.cond(edge, mask, lambda x: x, logits)


def _blank_dead_values(kernel: Kernel, piece: Piece, token0: Scalar, slot: Scalar) -> None:
    """Zeros the rows of V that no query sees: their weight is 0, but 0 * NaN is not."""
    p = kernel.problem
    for r in range(0, p.tile_tokens, 64):
        rows_smem = kernel.smem["v"].at[slot, pl.ds(r, 64)]
        shape = (64, p.padded_dim)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + (token0 + r)
        live = (token >= piece.facts.low) & (token < piece.facts.kv_len)
        values = load(rows_smem, WGMMA)
        store(rows_smem, jnp.where(live, values, jnp.zeros_like(values)))


def _leave_part(kernel: Kernel, piece: Piece, part) -> None:
    """Leaves the part of an item that starts in another CTA, and says so there."""
    maximum, total, acc = part
    store(kernel.gmem["part_acc"].at[kernel.cta], acc)
    store(kernel.gmem["part_stats"].at[kernel.cta, 0], maximum)
    store(kernel.gmem["part_stats"].at[kernel.cta, 1], total)
    if "ready" in kernel.gmem:
        # One thread signals; the barrier in commit_smem puts all threads' stores before that.
        plgpu.commit_smem()
        owner = kernel.cta + piece.owner * kernel.problem.lanes
        semaphore_signal(kernel.gmem["ready"].at[owner], **THIS_GPU)


def _finish_item(kernel: Kernel, piece: Piece, part) -> None:
    """Merges the parts that other CTAs left, in their order, and writes the item's output."""
    p = kernel.problem
    if "ready" in kernel.gmem:

        @pl.when(piece.others > 0)
        def _():
            semaphore_wait(kernel.gmem["ready"].at[kernel.cta], piece.others, **THIS_GPU)

    # A load takes most of a microsecond, so several parts are in flight at once.
    batch = max(1, min(8, 8192 // (p.padded_dim * p.columns)))

    def add_parts(chunk, part):
        loaded = []
        for i in range(batch):
            index = chunk * batch + i
            other = kernel.cta - (1 + jnp.minimum(index, piece.others - 1)) * p.lanes
            stats = kernel.gmem["part_stats"].at[other]
            maximum = jnp.where(index < piece.others, load(stats.at[0], COLUMNS), -jnp.inf)
            acc = load(kernel.gmem["part_acc"].at[other], WGMMA)
            loaded.append((maximum, load(stats.at[1], COLUMNS), acc))
        return functools.reduce(_merge, loaded, part)

    chunks = div(piece.others + (batch - 1), batch)
    maximum, total, acc = lax.fori_loop(0, chunks, add_parts, part)
    head = kernel.head(piece)
    if "sinks" in kernel.gmem:
        sinks = load(kernel.gmem["sinks"].at[head], COLUMNS)
        top = jnp.maximum(maximum, sinks)
        decay = jnp.exp2(maximum - top)
        maximum, total = top, total * decay + jnp.exp2(sinks - top)
        acc = acc * _rows(decay, p.padded_dim)
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    lse = (maximum + jnp.log2(total)) * (1 / LOG2E)

    first = piece.token_group * p.token_columns
    count = jnp.minimum(piece.facts.q_len - first, p.token_columns)
    token = piece.facts.first_token + first
    first_column = kernel.query_rows(piece)[1]
    _store_output(kernel, acc * _rows(inverse, p.padded_dim), token, head, first_column, count)
    for i in range(p.token_columns):
        columns = lse[i * p.head_columns : (i + 1) * p.head_columns]
        lse_gmem = kernel.gmem["lse"].at[token + i, head]
        pl.when(i < count)(functools.partial(store, lse_gmem, columns))


def _store_output(
    kernel: Kernel,
    out: jax.Array,
    token: Scalar,
    head: Scalar,
    first_column: Scalar,
    count: Scalar,
) -> None:
    """out [padded_dim, columns] -> `count` tokens' heads in gmem."""
    p = kernel.problem
    out_smem, out_gmem = kernel.smem["out"], kernel.gmem["out"]
    _store_transposed(out_smem.at[:, :], out.astype(out_gmem.dtype))
    plgpu.commit_smem()

    def store_token(i, _):
        heads_smem = out_smem.at[pl.ds(i * p.head_columns + first_column, p.chunk_heads)]
        if not p.padded:
            plgpu.copy_smem_to_gmem(heads_smem, out_gmem.at[token + i, head])
        else:
            for h in range(p.chunk_heads):
                head_smem = heads_smem.at[h, pl.ds(0, p.head_dim)]
                plgpu.copy_smem_to_gmem(head_smem, out_gmem.at[token + i, head, h])
        return ()

    lax.fori_loop(0, count, store_token, ())
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _blank_unused_tokens(kernel: Kernel) -> None:
    """Tokens of no row: output 0 and log-sum-exp -inf."""
    p = kernel.problem
    first = kernel.gmem["cu_q_lens"][p.num_rows] + kernel.cta

    def blank(i, _):
        token = first + i * p.ctas
        for head in range(p.heads):
            _store_output(kernel, _filled((p.padded_dim, p.columns), 0.0), token, head, 0, 1)
            no_lse = _filled((p.columns,), -jnp.inf)[: p.head_columns]
            store(kernel.gmem["lse"].at[token, head], no_lse)
        return ()

    lax.fori_loop(0, div(jnp.maximum(p.num_tokens - first + (p.ctas - 1), 0), p.ctas), blank, ())
