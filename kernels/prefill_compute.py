"""The computing warpgroups of the prefill kernel: a running softmax over tiles.

A warpgroup has 64 query tokens of one head as rows; see `prefill_output` for what it leaves.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_memory import load, store
from .prefill_output import (
    LOG2E,
    WGMMA,
    blank_unused_tokens,
    columns,
    filled,
    finish_item,
    finite,
    leave_part,
)
from .prefill_problem import ROWS, Kernel
from .prefill_schedule import Piece
from .schedule import Scalar, div, i32, rem


def _acc(width: int):
    return plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)


def compute_warpgroup(kernel: Kernel) -> None:
    """All that one computing warpgroup does."""
    p, turn = kernel.problem, kernel.barriers["turn"]
    plgpu.barrier_wait(kernel.barriers["planned"])
    if p.take_turns:  # the first turn is warpgroup 0's
        pl.when(kernel.warpgroup == p.warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
    pieces, _ = kernel.schedule.pieces(kernel.rank, functools.partial(_compute_piece, kernel))
    pl.when(pieces > 0)(lambda: _free_q(kernel, pieces - 1))
    if p.take_turns:
        pl.when(kernel.warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
    blank_unused_tokens(kernel)
    plgpu.wait_smem_to_gmem(0)


def _compute_piece(kernel: Kernel, piece: Piece) -> None:
    p, barriers = kernel.problem, kernel.barriers
    if p.q_slots == 1:
        pl.when(piece.index > 0)(lambda: _free_q(kernel, piece.index - 1))
    plgpu.barrier_wait(barriers["q_full"].at[rem(piece.index, p.q_slots)])
    k_slot, v_slot = kernel.slot("k", piece.tiles_before), kernel.slot("v", piece.tiles_before)
    plgpu.barrier_wait(barriers["k_full"].at[k_slot])
    _wait_turn(kernel)

    def first_logits(logits_ref):
        _multiply_q(kernel, logits_ref, piece, k_slot)
        _end_turn(kernel)
        return logits_ref[...]

    logits = pl.run_scoped(first_logits, _acc(p.tile_tokens))
    plgpu.barrier_arrive(barriers["k_empty"].at[k_slot])
    begin, end = _inner_tiles(kernel, piece)
    mask = functools.partial(_mask, kernel, piece, 0)
    logits, factor = _finish_logits(kernel, piece, 0, logits)
    logits = lax.cond((begin > 0) | (end <= 0), mask, lambda x: x, logits)
    state = filled((ROWS,), -jnp.inf), filled((ROWS, 8), 0.0)
    maximum, totals, _, weights = _softmax(kernel, logits, factor, *state)
    weights = weights.astype(kernel.smem["v"].dtype)
    plgpu.barrier_wait(barriers["v_full"].at[v_slot])
    carry = maximum, totals, weights, filled((ROWS, p.head_dim), 0.0)
    # Loops of their own for tiles with a mask: what it is made of would fill the others' registers.
    step = functools.partial(_compute_tile, kernel, piece)
    begin, end = jnp.maximum(begin, 1), jnp.maximum(end, 1)
    if kernel.options.window is None:
        begin = 1
    else:
        carry = lax.fori_loop(1, begin, functools.partial(step, is_edge=True), carry)
    carry = lax.fori_loop(begin, end, functools.partial(step, is_edge=False), carry)
    if p.q_slots > 1:
        # Late, since the last piece's output takes its time to leave; but early enough for the next
        # piece's queries.
        pl.when(piece.index > 0)(lambda: _free_q(kernel, piece.index - 1))
    carry = lax.fori_loop(end, piece.tiles, functools.partial(step, is_edge=True), carry)
    maximum, totals, weights, acc = carry

    last_slot = kernel.slot("v", piece.tiles_before + piece.tiles - 1)
    _blank_dead_values(kernel, piece, piece.tiles - 1)

    def last_values(acc_ref):
        _start(kernel, acc_ref, acc)
        _multiply_p(kernel, acc_ref, weights, last_slot)
        return acc_ref[...]

    acc = _finish(kernel, pl.run_scoped(last_values, _acc(p.head_dim)), acc)
    plgpu.barrier_arrive(barriers["v_empty"].at[last_slot])
    part = maximum, jnp.sum(totals, axis=1), acc
    pl.when(piece.is_first)(lambda: finish_item(kernel, piece, part))
    pl.when(jnp.logical_not(piece.is_first))(lambda: leave_part(kernel, piece, part))


def _free_q(kernel: Kernel, index: Scalar) -> None:
    """Lets the copying warps have the slot of q in which the output of piece `index` was."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(kernel.barriers["q_empty"].at[rem(index, kernel.problem.q_slots)])


def _wait_turn(kernel: Kernel) -> None:
    if kernel.problem.take_turns:
        plgpu.barrier_wait(kernel.barriers["turn"].at[kernel.warpgroup])


def _end_turn(kernel: Kernel) -> None:
    if kernel.problem.take_turns:
        next_one = rem(kernel.warpgroup + 1, kernel.problem.warpgroups)
        plgpu.barrier_arrive(kernel.barriers["turn"].at[next_one])


def _inner_tiles(kernel: Kernel, piece: Piece) -> tuple[jax.Array, jax.Array]:
    """[begin, end) of the piece's tiles in which every query of the warpgroup sees every key."""
    p, options = kernel.problem, kernel.options
    first_query = piece.position + kernel.first_row(kernel.warpgroup)
    seen = first_query + 1 if options.causal else piece.facts.kv_len
    end = div(jnp.maximum(seen, 0), p.tile_tokens) - piece.first_tile
    begin = i32(0)
    if options.window is not None:
        low = jnp.maximum(first_query + ROWS - options.window, 0)
        begin = div(low + (p.tile_tokens - 1), p.tile_tokens) - piece.first_tile
    begin = jnp.clip(begin, 0, piece.tiles)
    return begin, jnp.clip(end, begin, piece.tiles)


def _compute_tile(kernel: Kernel, piece: Piece, tile: Scalar, carry, is_edge: bool):
    """One step: this tile's logits and the previous one's values; then this tile's softmax."""
    p, barriers = kernel.problem, kernel.barriers
    maximum, totals, weights, acc = carry
    tile_of_cta = piece.tiles_before + tile
    k_slot, last_slot = kernel.slot("k", tile_of_cta), kernel.slot("v", tile_of_cta - 1)
    plgpu.barrier_wait(barriers["k_full"].at[k_slot])
    if is_edge or kernel.options.window is not None:
        _blank_dead_values(kernel, piece, tile - 1)
    _wait_turn(kernel)

    def multiply(logits_ref, acc_ref):
        _start(kernel, acc_ref, acc)
        _multiply_q(kernel, logits_ref, piece, k_slot)
        _multiply_p(kernel, acc_ref, weights, last_slot)
        _end_turn(kernel)
        # The values' product goes on while the softmax is computed.
        logits = lax.optimization_barrier(plgpu.wgmma_accumulator_load(logits_ref, wait_n=1))
        plgpu.barrier_arrive(barriers["k_empty"].at[k_slot])
        logits, factor = _finish_logits(kernel, piece, tile, logits)
        if is_edge:
            logits = _mask(kernel, piece, tile, logits)
        softmax = _softmax(kernel, logits, factor, maximum, totals)
        softmax = lax.optimization_barrier(softmax)
        # Values for the next step; and a branch, over which the compiler does not pull up the wait for
        # the product, as it else does.
        plgpu.barrier_wait(barriers["v_full"].at[kernel.slot("v", tile_of_cta)])
        return *softmax, acc_ref[...]

    new_maximum, totals, decay, new_weights, new_acc = pl.run_scoped(
        multiply, _acc(p.tile_tokens), _acc(p.head_dim)
    )
    plgpu.barrier_arrive(barriers["v_empty"].at[last_slot])
    acc = _finish(kernel, new_acc, acc) * columns(decay, p.head_dim)
    # Not before the product: its own operands are in registers, and it would be taken apart.
    return new_maximum, totals, new_weights.astype(weights.dtype), acc


def _start(kernel: Kernel, acc_ref, acc: jax.Array) -> None:
    """Products are added to what is there already; an interpreter only starts from zero."""
    if not kernel.problem.tuning.interpreted:
        acc_ref[...] = acc


def _finish(kernel: Kernel, product: jax.Array, acc: jax.Array) -> jax.Array:
    return product + acc if kernel.problem.tuning.interpreted else product


def _multiply_q(kernel: Kernel, acc_ref, piece: Piece, slot: Scalar) -> None:
    """acc [64, tile_tokens] += Q K^T"""
    p, q_slot = kernel.problem, kernel.q_slot(piece, kernel.warpgroup)
    for part in range(p.q_parts):
        part_columns = pl.ds(part * p.swizzle_elems, p.swizzle_elems)
        k_smem = kernel.smem["k"].at[slot, :, part_columns]
        plgpu.wgmma(acc_ref, kernel.smem["q"].at[q_slot, part], k_smem.transpose((1, 0)))


def _multiply_p(kernel: Kernel, acc_ref, weights: jax.Array, slot: Scalar) -> None:
    """acc [64, head_dim] += P V"""
    if kernel.problem.tuning.interpreted:
        p_smem = kernel.smem["p"].at[kernel.warpgroup]
        p_smem[...] = weights
        plgpu.commit_smem()
        weights = p_smem
    plgpu.wgmma(acc_ref, weights, kernel.smem["v"].at[slot])


def _softmax(
    kernel: Kernel, logits: jax.Array, factor: float, maximum: jax.Array, totals: jax.Array
):
    """Folds a tile's logits in: (maximum, totals [64, 8], decay of what was before, weights)."""
    tile_tokens = kernel.problem.tile_tokens
    largest = logits[:, :8]  # of every 8th column: four chains of operations in a thread, not two
    for column in range(8, tile_tokens, 8):
        largest = jnp.maximum(largest, logits[:, column : column + 8])
    new_maximum = jnp.maximum(maximum, jnp.max(largest, axis=1) * factor)
    base = finite(new_maximum)
    decay = jnp.exp2(maximum - base)
    weights = jnp.exp2(logits * factor - columns(base, tile_tokens))
    totals = totals * columns(decay, 8)
    for column in range(0, tile_tokens, 8):  # every 8th column: added up once, at the end
        totals = totals + weights[:, column : column + 8]
    return new_maximum, totals, decay, weights


def _finish_logits(kernel: Kernel, piece: Piece, tile: Scalar, logits: jax.Array):
    """Soft cap and ALiBi. Returns logits, and the factor that makes them units of log2."""
    options = kernel.options
    factor = options.scale * LOG2E
    if options.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own tanh has 11 bits.
        power = jnp.exp2(logits * (2 * factor / options.soft_cap))
        logits, factor = 1.0 - 2.0 / (power + 1.0), options.soft_cap * LOG2E
    if factor <= 0 or "slopes" in kernel.gmem:
        logits, factor = logits * factor, 1.0
    if "slopes" in kernel.gmem:
        slope = kernel.gmem["slopes"][kernel.query_head(piece, kernel.warpgroup)]
        logits = logits + slope * _distance(kernel, piece, tile).astype(jnp.float32)
    return logits, factor


def _iota(kernel: Kernel, axis: int) -> jax.Array:
    shape = (ROWS, kernel.problem.tile_tokens)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def _distance(kernel: Kernel, piece: Piece, tile: Scalar) -> jax.Array:
    """Position of the key minus that of the query."""
    first_query = piece.position + kernel.first_row(kernel.warpgroup)
    token0 = (piece.first_tile + tile) * kernel.problem.tile_tokens
    return _iota(kernel, 1) - _iota(kernel, 0) + (token0 - first_query)


def _mask(kernel: Kernel, piece: Piece, tile: Scalar, logits: jax.Array) -> jax.Array:
    """-inf for keys that the query does not see."""
    options = kernel.options
    if options.causal:
        distance = _distance(kernel, piece, tile)
        seen = distance <= 0
        if options.window is not None:
            seen = seen & (distance > -options.window)
    else:
        token0 = (piece.first_tile + tile) * kernel.problem.tile_tokens
        seen = _iota(kernel, 1) < piece.facts.kv_len - token0
    return jnp.where(seen, logits, -jnp.inf)


def _blank_dead_values(kernel: Kernel, piece: Piece, tile: Scalar) -> None:
    """Zeros the rows of V that no query sees: their weight is 0, but 0 * NaN is not."""
    p, facts = kernel.problem, piece.facts
    token0 = (piece.first_tile + tile) * p.tile_tokens
    v_smem = kernel.smem["v"].at[kernel.slot("v", piece.tiles_before + tile)]

    @pl.when((token0 + p.tile_tokens > facts.kv_len) | (token0 < facts.low))
    def _():
        for i in range(p.tile_tokens // ROWS):

            @pl.when(kernel.warpgroup == i % p.warpgroups)
            def _(first=i * ROWS):
                rows_smem = v_smem.at[pl.ds(first, ROWS)]
                shape = (ROWS, p.head_dim)
                token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + token0 + first
                live = (token >= facts.low) & (token < facts.kv_len)
                values = load(rows_smem, WGMMA)
                store(rows_smem, jnp.where(live, values, jnp.zeros_like(values)))

        plgpu.commit_smem()
        plgpu.barrier_arrive(kernel.barriers["blanked"])
        plgpu.barrier_wait(kernel.barriers["blanked"])
