"""Paged decode attention for NVIDIA Hopper: TMA copies, wgmma products, a persistent grid (Mosaic GPU).

A decode step does almost no arithmetic for the bytes that it reads, so everything serves one end: to
keep the memory busy from the first microsecond to the last.

- The products are turned around. A wgmma has 64 rows, and a KV head few query heads; so tokens are
  the rows (S^T = K Q^T) and queries the columns, at least 8. That is an eighth of the exponentials,
  and the accumulator (O^T = V^T P^T) takes 8 registers of a thread instead of 64.
- P is a high and a low part in the pool's dtype, side by side as columns of one product: reading V
  is what such a product takes its time for. The output's rounding is the only one left.
- CTAs share out the work by tiles (`decode_schedule`). Warps that only copy (`decode_copy`) run ahead
  over the ends of items; only the first tile of a CTA waits for the memory.
- An item that was cut is merged by the CTA that starts it (`decode_compute`). The others leave their
  parts in float32 and raise a semaphore. They did those parts first: the wait is short, and nothing
  is launched for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from .decode_compute import LOG2E, compute_warpgroup
from .decode_copy import copy_warp
from .decode_problem import (
    H200_SMS,
    REDUCTION_SCRATCH_BYTES,
    Kernel,
    Options,
    Problem,
    Tuning,
)
from .decode_schedule import Schedule
from .hopper import hopper_unsupported_reason
from .schedule import PLAN_WORDS, i32

MAX_QUERY_LEN = 8
DEFAULT_TUNING = Tuning()


def paged_attention_unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct,
    k_pool: jax.Array | jax.ShapeDtypeStruct,
    *,
    max_query_len: int,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
    alibi_slopes: jax.Array | jax.ShapeDtypeStruct | None = None,
    causal: bool = True,
    compute_capability: float | None = None,
) -> str | None:
    """Why `paged_attention` here cannot serve a call, or None if it can; every option is served.

    Args:
      q: [T, H, D]. k_pool: [L, N, P, K, D]. Arrays, or their shapes and dtypes.
      max_query_len: no row has more query tokens.
      causal: whether a query sees the keys up to its own position only.
      compute_capability: of the GPU, such as 9.0; None where there is none.
    """
    del logits_soft_cap, sliding_window, sinks, alibi_slopes
    if not causal:
        return f"{causal=}; mosaic_gpu decode is causal"
    if max_query_len > MAX_QUERY_LEN:
        return f"{max_query_len=}; mosaic_gpu decode serves at most {MAX_QUERY_LEN} tokens a row"
    return hopper_unsupported_reason("mosaic_gpu decode", q, k_pool, compute_capability)


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array | int,
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    max_query_len: int,
    scale: float,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of up to 8 query tokens per row over the blocks of their rows.

    Args:
      q: [T, H, D] bfloat16 or float16, the rows' query tokens one after another.
      k_pool, v_pool: [L, N, P, K, D] of q's dtype; query head h belongs to KV head h // (H // K).
      layer: int32 [], may be traced.
      block_table: int32 [B, M]; entries that no query of the row sees are not read.
      kv_lens: int32 [B], tokens of each row, its query tokens included; 0: takes no part.
      cu_q_lens: int32 [B + 1]; row b has query tokens cu_q_lens[b] to cu_q_lens[b + 1] - 1.
      max_query_len: no row has more query tokens; at most 8.
      scale: of the logits.
      logits_soft_cap: a logit s becomes cap * tanh(s / cap).
      sliding_window: how many keys a query sees, its own included.
      sinks: float32 [H], one more logit per head, in the denominator only.
      alibi_slopes: float32 [H]; slope * (key position - query position) is added to a logit.
      tuning: sizes to try instead of those that follow from the shapes.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log. A query that sees
      nothing has 0, and -inf or its sink; a token of no row 0 and -inf. The bits depend on which
      rows share the batch (that decides where items are cut), and on nothing else.
    """
    reason = paged_attention_unsupported_reason(
        q, k_pool, max_query_len=max_query_len, compute_capability=9.0
    )
    if reason is not None:
        raise ValueError(reason)
    num_tokens, num_heads, head_dim = q.shape
    if tuning.ctas is None and jax.default_backend() == "gpu":
        sms = getattr(jax.local_devices()[0], "core_count", H200_SMS)
        tuning = dataclasses.replace(tuning, ctas=sms)
    p = Problem(
        num_rows=kv_lens.shape[0],
        num_tokens=num_tokens,
        kv_heads=k_pool.shape[3],
        group=num_heads // k_pool.shape[3],
        head_dim=head_dim,
        block_size=k_pool.shape[2],
        max_query_len=max_query_len,
        itemsize=k_pool.dtype.itemsize,
        tuning=tuning,
    )
    operands = dict(
        q=_to_columns(p, q),
        k=k_pool,
        v=v_pool,
        layer=i32(layer).reshape(1),
        table=block_table,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
    )
    for name, values in (("sinks", sinks), ("slopes", alibi_slopes)):
        if values is not None:
            operands[name] = _per_column(p, values)
    out, lse = _launch(p, Options(scale, logits_soft_cap, sliding_window), operands)
    if p.shared_columns:  # of the 8 / G heads that share columns, each KV head owns one part
        parts = 8 // p.group
        lse = lse.reshape(num_tokens, num_heads // 8, parts, parts, p.group)
        lse = jnp.diagonal(lse, axis1=2, axis2=3).swapaxes(2, 3)
    else:
        lse = lse[:, :, : p.chunk_heads].reshape(num_tokens, p.kv_heads, -1)[:, :, : p.group]
    out = out.reshape(num_tokens, p.kv_heads, -1, head_dim)[:, :, : p.group]
    return out.reshape(q.shape), lse.reshape(num_tokens, num_heads)


def _to_columns(p: Problem, x: jax.Array) -> jax.Array:
    """[T, H, D] -> [T, rows, D]: the query heads of each of p.heads fill rows of their own."""
    if p.shared_columns:
        return x
    t, _, d = x.shape
    x = x.reshape(t, p.kv_heads, p.group, d)
    missing = p.head_chunks * p.chunk_heads - p.group
    x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))).reshape(t, p.heads, p.chunk_heads, d)
    missing = p.head_columns - p.chunk_heads
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))).reshape(t, -1, d)


def _per_column(p: Problem, x: jax.Array) -> jax.Array:
    """Natural units, [H] -> units of log2, float32 [p.heads, p.columns]."""
    x = _to_columns(p, x.astype(jnp.float32)[None, :, None] * LOG2E).reshape(-1, p.head_columns)
    return jnp.tile(jnp.repeat(x, p.heads // x.shape[0], axis=0), (1, p.token_columns))


def _launch(p: Problem, options: Options, operands: dict[str, jax.Array]):
    """Returns (out [T, heads, chunk_heads, D], lse [T, heads, head_columns])."""
    q_dtype, dtype = operands["q"].dtype, operands["k"].dtype
    outputs = dict(
        out=jax.ShapeDtypeStruct((p.num_tokens, p.heads, p.chunk_heads, p.head_dim), q_dtype),
        lse=jax.ShapeDtypeStruct((p.num_tokens, p.heads, p.head_columns), jnp.float32),
        part_acc=jax.ShapeDtypeStruct((p.ctas, p.padded_dim, p.columns), jnp.float32),
        part_stats=jax.ShapeDtypeStruct((p.ctas, 2, p.columns), jnp.float32),
    )

    def tiled(shape: tuple[int, ...], rows: int = 8):
        tiling = plgpu.TilingTransform((rows, p.swizzle_elems))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(p.swizzle)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    ring = tiled((p.stages, p.tile_tokens, p.padded_dim))
    if p.block_size < 8:  # the same bytes by parts of their tiles
        parts = (p.tile_tokens // 8, p.padded_dim // p.swizzle_elems, 8 // p.block_size)
        ring = plgpu.RefUnion(
            ring, tiled((p.stages, *parts, p.block_size, p.swizzle_elems), rows=p.block_size)
        )
    scratch = dict(
        q=tiled((2, p.columns, p.head_dim)),
        k=ring,
        v=ring,
        # The output waits for its way out where P was.
        p=plgpu.RefUnion(
            tiled((2 * p.columns, p.tile_tokens)), plgpu.SMEM((p.columns, p.padded_dim), q_dtype)
        ),
        plan=plgpu.SMEM((PLAN_WORDS,), jnp.int32),
    )
    barriers = dict(
        q_full=plgpu.Barrier(num_arrivals=p.token_columns, num_barriers=2),
        q_empty=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=p.copies * p.copy_parts, num_barriers=p.stages),
        v_full=plgpu.Barrier(num_arrivals=p.copies * p.copy_parts, num_barriers=p.stages),
        empty=plgpu.Barrier(num_barriers=p.stages),
        summed=plgpu.Barrier(num_arrivals=4),
        planned=plgpu.Barrier(num_arrivals=4),
    )

    def paged_decode(*refs):
        names = iter(refs)
        gmem, smem, barrier_refs = (
            {name: next(names) for name in group}
            for group in ((*operands, *outputs), scratch, barriers)
        )
        smem["p"], smem["out"] = smem["p"]
        if p.block_size < 8:
            smem["k"], smem["k_parts"] = smem["k"]
            smem["v"], smem["v_parts"] = smem["v"]
        if p.tuning.concurrent_ctas:
            gmem["ready"] = pl.get_global(plgpu.SemaphoreType.REGULAR((p.ctas,)))
        schedule = Schedule(
            num_rows=p.num_rows,
            heads=p.heads // p.lanes,
            token_groups=p.token_groups,
            tile_tokens=p.tile_tokens,
            window=options.window,
            ctas=p.ctas // p.lanes,
            kv_lens_gmem=gmem["kv_lens"],
            cu_q_lens_gmem=gmem["cu_q_lens"],
            plan_smem=smem["plan"],
        )
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        kernel = Kernel(p, options, schedule, cta, gmem, smem, barrier_refs)
        pl.when(warpgroup == 0)(lambda: compute_warpgroup(kernel))
        pl.when(warpgroup == 1)(lambda: plgpu.warp_map(lambda warp: copy_warp(kernel, warp)))

    out, lse, *_ = plgpu.kernel(
        paged_decode,
        out_type=tuple(outputs.values()),
        scratch_types=(*scratch.values(), *barriers.values()),
        grid=(p.ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES,
            # Barriers, reductions and commit_smem order all accesses between threads here.
            unsafe_no_auto_barriers=True,
            lowering_semantics=LoweringSemantics.Lane,
        ),
    )(*operands.values())
    return out, lse
