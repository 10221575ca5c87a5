"""The computing warpgroups of the prefill kernel: a running softmax over tiles, and the merge of cut items.

A warpgroup has 64 query tokens of one head as rows. Its partial result is (maximum [64], total [64],
acc [64, head_dim]): the largest logit in units of log2, the sum of exp2(logit - maximum) and the
values weighted by it, all float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu_memory import THIS_GPU, load, semaphore_signal, semaphore_wait, store
from .prefill_problem import ROWS, Kernel
from .prefill_schedule import Piece
from .schedule import Scalar, div, i32, rem

LOG2E = 1.4426950408889634
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # one value per query, the same in all columns


def _filled(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = WGMMA if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _columns(rows: jax.Array, count: int) -> jax.Array:
    """[rows] -> [rows, count]"""
    return lax.broadcast_in_dim(rows, (rows.shape[0], count), (0,))


def _finite(maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 where nothing was seen: then -inf - 0 is -inf, and its exp2 is 0."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _acc(columns: int):
    return plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)


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
    _blank_unused_tokens(kernel)
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
    state = _filled((ROWS,), -jnp.inf), _filled((ROWS, 8), 0.0)
    maximum, totals, _, weights = _softmax(kernel, logits, factor, *state)
    weights = weights.astype(kernel.smem["v"].dtype)
    plgpu.barrier_wait(barriers["v_full"].at[v_slot])
    carry = maximum, totals, weights, _filled((ROWS, p.head_dim), 0.0)
    # Loops of their own for tiles with a mask: what it is made of would fill the others' registers.
    step = functools.partial(_compute_tile, kernel, piece)
    begin, end = jnp.maximum(begin, 1), jnp.maximum(end, 1)
    if kernel.options.window is None:
        begin = 1
    else:
        carry = lax.fori_loop(1, begin, functools.partial(step, is_edge=True), carry)
    carry = lax.fori_loop(begin, end, functools.partial(step, is_edge=False), carry)
    if p.q_slots > 1:
        # The last piece's output takes microseconds to leave; here it has, and it is early enough for
        # the next piece's queries.
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
    pl.when(piece.is_first)(lambda: _finish_item(kernel, piece, part))
    pl.when(jnp.logical_not(piece.is_first))(lambda: _leave_part(kernel, piece, part))


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
    acc = _finish(kernel, new_acc, acc) * _columns(decay, p.head_dim)
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
        columns = pl.ds(part * p.swizzle_elems, p.swizzle_elems)
        k_smem = kernel.smem["k"].at[slot, :, columns]
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
    finite = _finite(new_maximum)
    decay = jnp.exp2(maximum - finite)
    weights = jnp.exp2(logits * factor - _columns(finite, tile_tokens))
    totals = totals * _columns(decay, 8)
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


def _leave_part(kernel: Kernel, piece: Piece, part) -> None:
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


def _finish_item(kernel: Kernel, piece: Piece, part) -> None:
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
        mine, others = jnp.exp2(part[0] - _finite(top)), jnp.exp2(maximum - _finite(top))
        acc = part[2] * _columns(mine, p.head_dim) + acc * _columns(others, p.head_dim)
        return top, part[1] * mine + total * others, acc

    maximum, total, acc = lax.fori_loop(0, piece.others, add_part, part)
    head = kernel.query_head(piece, kernel.warpgroup)
    if "sinks" in kernel.gmem:
        sink = jnp.full_like(maximum, kernel.gmem["sinks"][head])
        top = jnp.maximum(maximum, sink)
        decay = jnp.exp2(maximum - top)
        maximum, total = top, total * decay + jnp.exp2(sink - top)
        acc = acc * _columns(decay, p.head_dim)
    inverse = jnp.where(total > 0, 1.0 / total, 0.0)
    first = kernel.first_row(kernel.warpgroup)
    tile = piece.token_tile * (p.item_tokens // ROWS) + div(first, ROWS)
    store(kernel.gmem["lse"].at[tile, head], (maximum + jnp.log2(total)) * (1 / LOG2E))
    out = (acc * _columns(inverse, p.head_dim)).astype(kernel.gmem["out"].dtype)
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
            columns = pl.ds(part * p.swizzle_elems, p.swizzle_elems)
            tokens_gmem = out_gmem.at[pl.ds(token, ROWS), head, columns]
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


def _blank_unused_tokens(kernel: Kernel) -> None:
    """Tokens of no row: output 0."""
    p = kernel.problem
    first = kernel.gmem["cu_q_lens"][p.num_rows]
    worker = kernel.cta * p.warpgroups + kernel.warpgroup
    workers = p.ctas * p.warpgroups
    heads = p.kv_heads * p.group
    chunks = div(jnp.maximum(p.num_tokens - first, 0) + (ROWS - 1), ROWS) * heads
    zeros = _filled((ROWS, p.head_dim), 0.0).astype(kernel.gmem["out"].dtype)

    def blank(i, _):
        chunk = worker + i * workers
        token = first + div(chunk, heads) * ROWS
        count = jnp.minimum(p.num_tokens - token, ROWS)
        # All of q was used: every slot is free.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store_output(kernel, zeros, kernel.warpgroup, token, rem(chunk, heads), count)
        return ()

    lax.fori_loop(0, div(jnp.maximum(chunks - worker, 0) + (workers - 1), workers), blank, ())
