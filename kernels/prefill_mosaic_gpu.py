"""Ragged paged prefill for NVIDIA Hopper: TMA copies, wgmma products, a persistent grid (Mosaic GPU).

Prefill is arithmetic, so everything serves one end: to keep the tensor cores busy.

- A warpgroup has 64 query tokens of one head, and those of a CTA have heads of one KV head: K and V
  are copied once for all of them. P stays in registers between the two products.
- While a tile's softmax is computed, the tensor cores have the previous tile's values to multiply,
  and the other warpgroup's products: the warpgroups take turns. ("FlashAttention-3", Shah et al.,
  2024, arXiv:2407.08608.)
- CTAs share out the work by tiles (`prefill_schedule`): causal tiles that nobody sees are no work,
  and a long row is split over as many CTAs as there are. Only tiles at an edge are masked.
- Warps that only copy (`prefill_copy`) run ahead over the ends of items. An item that was cut is
  merged by the CTA that starts it (`prefill_output`), from parts in float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from .decode_problem import H200_SMS, REDUCTION_SCRATCH_BYTES
from .hopper import hopper_unsupported_reason
from .prefill_compute import compute_warpgroup
from .prefill_copy import copy_warp
from .prefill_output import LOG2E
from .prefill_problem import ROWS, Kernel, Options, Problem, Tuning
from .prefill_schedule import Schedule
from .schedule import PLAN_WORDS, i32

DEFAULT_TUNING = Tuning()
# Registers of a thread that computes and of one that copies, by the number of warpgroups that compute:
# together no more than an SM has.
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32)}


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
    """Why `paged_attention` here cannot serve a call, or None if it can.

    Args:
      q: [T, H, D]. k_pool: [L, N, P, K, D]. Arrays, or their shapes and dtypes.
      max_query_len: no row has more query tokens.
      causal: False: every query of a row sees all of its keys.
      compute_capability: of the GPU, such as 9.0; None where there is none.
    """
    del max_query_len, logits_soft_cap, sinks
    if not causal and sliding_window is not None:
        return f"{causal=} with {sliding_window=}; a window needs causal=True"
    if not causal and alibi_slopes is not None:
        return f"{causal=} with alibi_slopes; ALiBi needs causal=True"
    return hopper_unsupported_reason("mosaic_gpu prefill", q, k_pool, compute_capability)


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
    causal: bool = True,
    min_query_len: int = 1,
    tuning: Tuning = DEFAULT_TUNING,
) -> tuple[jax.Array, jax.Array]:
    """Attention of any number of query tokens per row over the blocks of their rows.

    Args:
      q: [T, H, D] bfloat16 or float16, the rows' query tokens one after another.
      k_pool, v_pool: [L, N, P, K, D] of q's dtype; query head h belongs to KV head h // (H // K).
      layer: int32 [], may be traced.
      block_table: int32 [B, M]; entries that no query of the row sees are not read.
      kv_lens: int32 [B], tokens of each row, its query tokens included; 0: takes no part.
      cu_q_lens: int32 [B + 1]; row b has query tokens cu_q_lens[b] to cu_q_lens[b + 1] - 1.
      max_query_len: no row has more query tokens.
      scale: of the logits.
      logits_soft_cap: a logit s becomes cap * tanh(s / cap).
      sliding_window: how many keys a query sees, its own included.
      sinks: float32 [H], one more logit per head, in the denominator only.
      alibi_slopes: float32 [H]; slope * (key position - query position) is added to a logit.
      causal: whether a query sees the keys up to its own position only, or all of its row.
      min_query_len: rows with fewer query tokens are left out: what they get is not defined.
      tuning: sizes to try instead of those that follow from the shapes.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log. A query that sees
      nothing has 0, and -inf or its sink; a token of no row 0 and -inf. The bits depend on which
      rows share the batch (that decides where items are cut), and on nothing else.
    """
    reason = paged_attention_unsupported_reason(
        q,
        k_pool,
        max_query_len=max_query_len,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        causal=causal,
        compute_capability=9.0,
    )
    if reason is not None:
        raise ValueError(reason)
    num_tokens, num_heads, head_dim = q.shape
    if tuning.ctas is None and jax.default_backend() == "gpu":
        sms = getattr(jax.local_devices()[0], "core_count", H200_SMS)
        tuning = dataclasses.replace(tuning, ctas=sms)
    missing = max(0, ROWS - num_tokens)  # a copy takes 64 tokens
    p = Problem(
        num_rows=kv_lens.shape[0],
        num_tokens=num_tokens + missing,
        kv_heads=k_pool.shape[3],
        group=num_heads // k_pool.shape[3],
        head_dim=head_dim,
        block_size=k_pool.shape[2],
        itemsize=k_pool.dtype.itemsize,
        tuning=tuning,
    )
    most = p.units * p.token_tiles * pl.cdiv(block_table.shape[1] * p.block_size, p.tile_tokens)
    if most >= 2**31 - p.ctas:
        raise ValueError(
            f"{num_tokens} query tokens of {num_heads} heads over block tables of "
            f"{block_table.shape[1]} blocks may be {most} tiles of work, more than int32 counts"
        )
    operands = dict(
        q=jnp.pad(q, ((0, missing), (0, 0), (0, 0))),
        k=k_pool,
        v=v_pool,
        layer=i32(layer).reshape(1),
        table=block_table,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
    )
    for name, values in (("sinks", sinks), ("slopes", alibi_slopes)):
        if values is not None:
            operands[name] = values.astype(jnp.float32) * LOG2E
    options = Options(scale, logits_soft_cap, sliding_window, causal, min_query_len)
    out, lse = _launch(p, options, operands)
    return out[:num_tokens], _lse_of_tokens(p, lse, cu_q_lens, num_tokens)


def _lse_of_tokens(p: Problem, lse: jax.Array, cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """[token tiles of 64, H, 64] -> [T, H]; XLA leaves it out where nobody asks for it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all")
    is_token = row < p.num_rows
    row = jnp.minimum(row, p.num_rows - 1).astype(jnp.int32)
    nth = token - cu_q_lens[row]
    item = cu_q_lens[row] // p.item_tokens + row + nth // p.item_tokens
    tile = item * (p.item_tokens // ROWS) + nth % p.item_tokens // ROWS
    lse = lse[jnp.where(is_token, tile, 0), :, nth % ROWS]
    return jnp.where(is_token[:, None], lse, -jnp.inf)


def _launch(p: Problem, options: Options, operands: dict[str, jax.Array]):
    """Returns (out [T, H, D], lse [token tiles of 64, H, 64])."""
    dtype, heads = operands["q"].dtype, p.kv_heads * p.group
    parts = p.ctas * p.warpgroups
    lse_tiles = p.token_tiles * (p.item_tokens // ROWS)
    outputs = dict(
        out=jax.ShapeDtypeStruct((p.num_tokens, heads, p.head_dim), dtype),
        lse=jax.ShapeDtypeStruct((lse_tiles, heads, ROWS), jnp.float32),
        part_acc=jax.ShapeDtypeStruct((parts, ROWS, p.head_dim), jnp.float32),
        part_stats=jax.ShapeDtypeStruct((parts, 2, ROWS), jnp.float32),
    )

    def tiled(shape: tuple[int, ...], rows: int = 8):
        tiling = plgpu.TilingTransform((rows, p.swizzle_elems))  # pyright: ignore[reportAbstractUsage]
        swizzling = plgpu.SwizzleTransform(p.swizzle)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))

    def ring(name: str):
        tiles = tiled((p.stages[name], p.tile_tokens, p.head_dim))
        if p.block_size >= 8:
            return tiles
        # The same bytes by parts of their tiles.
        small = (p.tile_tokens // 8, p.head_dim // p.swizzle_elems, 8 // p.block_size)
        shape = (p.stages[name], *small, p.block_size, p.swizzle_elems)
        return plgpu.RefUnion(tiles, tiled(shape, rows=p.block_size))

    # q by parts of a swizzle's width. As products read them, parts are tiles of 8 rows; a copy takes
    # them for 64 rows that may start at any token. The output waits for its way out where q was.
    slots = p.q_slots * p.warpgroups
    q_shape = (slots, p.q_parts, ROWS, p.swizzle_elems)
    swizzling = plgpu.SwizzleTransform(p.swizzle)  # pyright: ignore[reportAbstractUsage]
    views = dict(
        q=tiled(q_shape),
        q_rows=plgpu.SMEM(q_shape, dtype, transforms=(swizzling,)),
        out_rows=plgpu.SMEM((slots, ROWS, p.head_dim), dtype),
    )
    scratch: dict[str, Any] = dict(
        k=ring("k"), v=ring("v"), plan=plgpu.SMEM((PLAN_WORDS,), jnp.int32)
    )
    if p.tuning.interpreted:
        scratch |= dict(q=views["q"], out_rows=views["out_rows"])
        scratch["p"] = tiled((p.warpgroups, ROWS, p.tile_tokens))
    else:
        scratch["q"] = plgpu.RefUnion(*views.values())
    copies = p.copies * p.copy_parts
    barriers = dict(
        q_full=plgpu.Barrier(num_arrivals=p.warpgroups * p.q_parts, num_barriers=p.q_slots),
        q_empty=plgpu.Barrier(num_arrivals=p.warpgroups, num_barriers=p.q_slots),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=p.stages["k"]),
        k_empty=plgpu.Barrier(num_arrivals=p.warpgroups, num_barriers=p.stages["k"]),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=p.stages["v"]),
        v_empty=plgpu.Barrier(num_arrivals=p.warpgroups, num_barriers=p.stages["v"]),
        turn=plgpu.Barrier(num_barriers=p.warpgroups),
        blanked=plgpu.Barrier(num_arrivals=p.warpgroups),
        summed=plgpu.Barrier(num_arrivals=4),
        planned=plgpu.Barrier(num_arrivals=4),
    )
    registers = REGISTERS[p.warpgroups]

    def paged_prefill(*refs):
        names = iter(refs)
        gmem, smem, barrier_refs = (
            {name: next(names) for name in group}
            for group in ((*operands, *outputs), scratch, barriers)
        )
        if p.tuning.interpreted:
            smem["q_rows"] = smem["q"]
        else:
            smem |= zip(views, smem["q"], strict=True)
            gmem["ready"] = pl.get_global(plgpu.SemaphoreType.REGULAR((parts,)))
        if p.block_size < 8:
            smem["k"], smem["k_parts"] = smem["k"]
            smem["v"], smem["v_parts"] = smem["v"]
        schedule = Schedule(
            num_rows=p.num_rows,
            ctas=p.ctas,
            kv_lens_gmem=gmem["kv_lens"],
            cu_q_lens_gmem=gmem["cu_q_lens"],
            plan_smem=smem["plan"],
            units=p.units,
            item_tokens=p.item_tokens,
            tile_tokens=p.tile_tokens,
            causal=options.causal,
            window=options.window,
            min_query_len=options.min_query_len,
        )
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        kernel = Kernel(p, options, schedule, cta, warpgroup, gmem, smem, barrier_refs)

        @pl.when(warpgroup < p.warpgroups)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            compute_warpgroup(kernel)

        @pl.when(warpgroup == p.warpgroups)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            plgpu.warp_map(lambda warp: copy_warp(kernel, warp))

    out, lse, *_ = plgpu.kernel(
        paged_prefill,
        out_type=tuple(outputs.values()),
        scratch_types=(*scratch.values(), *barriers.values()),
        grid=(p.ctas,),
        grid_names=("cta",),
        num_threads=p.warpgroups + 1,
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
