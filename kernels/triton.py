"""Paged decode attention and KV writes through Pallas Triton, for Ampere, Ada and newer GPUs.

JAX deprecates this backend since 0.11 and says so with a warning. Nothing else in the package
imports this module, except the dispatch that names it: deleting it is deleting one file.

Decode is flash decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): each
program attends with the query rows of one KV head over one part of one row's tokens, and leaves
unnormalised float32 partial results that are merged and normalised once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MAX_QUERY_LEN = 8
MAX_HEAD_DIM = 256
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
LOG2_E = math.log2(math.e)
# Enough programs to fill the largest GPU of today several times over, so that rows of unequal
# length even out; past MAX_SPLITS, merging costs more than the balance gains.
TARGET_PROGRAMS = 4096
MAX_SPLITS = 64


def paged_attention_unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct,
    k_pool: jax.Array | jax.ShapeDtypeStruct,
    *,
    max_query_len: int,
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
    alibi_slopes: jax.Array | jax.ShapeDtypeStruct | None = None,
    compute_capability: float | None = None,
) -> str | None:
    """Why `paged_attention` here cannot serve a call, or None if it can."""
    del logits_soft_cap, sliding_window, sinks, alibi_slopes
    reason = write_unsupported_reason(k_pool, compute_capability=compute_capability)
    if reason is not None:
        return reason
    if max_query_len > MAX_QUERY_LEN:
        return f"{max_query_len=}; triton serves decode, at most {MAX_QUERY_LEN} tokens a row"
    if not causal:
        return f"{causal=}; triton serves causal attention only"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim={q.shape[-1]}; triton serves head_dim up to {MAX_HEAD_DIM}"
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}; triton serves bfloat16, float16 and float32"
    return None


def write_unsupported_reason(
    k_pool: jax.Array | jax.ShapeDtypeStruct, *, compute_capability: float | None = None
) -> str | None:
    """Why `write` here cannot serve a pool, or None if it can."""
    if compute_capability is None or compute_capability < 8.0:
        return (
            f"{compute_capability=}; triton needs an NVIDIA GPU of compute capability 8.0 or newer"
        )
    if k_pool.dtype not in DTYPES:
        return f"the pool has dtype {k_pool.dtype}; triton serves bfloat16, float16 and float32"
    return None


def _decode_kernel(
    layer_ref,  # int32 [1]
    table_ref,  # int32 [B, M]
    kv_lens_ref,  # int32 [B]
    cu_q_lens_ref,  # int32 [B + 1]
    slopes_ref,  # float32 [H], or None
    q_ref,  # [T, H, D]
    k_ref,  # [L, N, P, K, D]
    v_ref,
    acc_ref,  # float32 [splits, T, H, D]: sum of weights * V
    top_ref,  # float32 [splits, T, H]: greatest logit, in units of log2
    total_ref,  # float32 [splits, T, H]: sum of weights
    *,
    scale: float,
    logits_soft_cap: float | None,
    sliding_window: int | None,
    query_tile: int,
    key_tile: int,
):
    num_heads, head_dim = q_ref.shape[1:]
    block_size, num_kv_heads = k_ref.shape[2:4]
    group = num_heads // num_kv_heads
    query_tiles = pl.num_programs(0) // num_kv_heads
    kv_head = pl.program_id(0) // query_tiles
    row, split = pl.program_id(1), pl.program_id(2)
    layer = layer_ref[0]

    kv_len = kv_lens_ref[row]
    first_token = cu_q_lens_ref[row]
    query_len = cu_q_lens_ref[row + 1] - first_token

    # Row r of the tile is head r % G of query token r // G.
    index = pl.program_id(0) % query_tiles * query_tile + jnp.arange(query_tile)
    is_query = index < query_len * group
    token = first_token + index // group
    head = kv_head * group + index % group
    position = kv_len - query_len + index // group
    dim = jnp.arange(pl.next_power_of_2(head_dim))
    in_head = dim < head_dim
    query_mask = is_query[:, None] & in_head
    q = plgpu.load(q_ref.at[token[:, None], head[:, None], dim[None, :]], mask=query_mask, other=0)
    slope = None
    if slopes_ref is not None:
        slope = LOG2_E * plgpu.load(slopes_ref.at[head], mask=is_query, other=0)[:, None]

    # The tiles [start, end) of this split; those before `masked` are seen whole by every query.
    first_key = 0
    if sliding_window is not None:
        first_key = jnp.maximum(kv_len - query_len + 1 - sliding_window, 0)
    first_tile = first_key // key_tile
    last_tile = pl.cdiv(kv_len, key_tile)
    tiles_per_split = pl.cdiv(last_tile - first_tile, pl.num_programs(2))
    start = first_tile + split * tiles_per_split
    end = jnp.minimum(start + tiles_per_split, last_tile)
    masked = start
    if sliding_window is None:
        masked = jnp.clip((kv_len - query_len + 1) // key_tile, start, jnp.maximum(start, end))
    # Float32 products stay float32: the default would round their operands to 10 bits.
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def attend(tile, carry, *, is_masked: bool):
        top, total, acc = carry
        key = tile * key_tile + jnp.arange(key_tile)
        is_live = (key >= first_key) & (key < kv_len)
        mask = (
            is_live[:, None] & in_head
            if is_masked
            else jnp.broadcast_to(in_head, (key_tile, dim.size))
        )
        block = plgpu.load(
            table_ref.at[row, key // block_size],
            mask=is_live if is_masked else None,
            other=0 if is_masked else None,
        )
        where = (layer, block[:, None], (key % block_size)[:, None], kv_head, dim[None, :])
        k = plgpu.load(k_ref.at[where], mask=mask, other=0).astype(q.dtype)
        v = plgpu.load(v_ref.at[where], mask=mask, other=0).astype(q.dtype)

        logits = plgpu.dot(q, k, trans_b=True, precision=precision)
        if logits_soft_cap is None:
            logits *= scale * LOG2_E
        else:
            capped = jnp.tanh(logits * (scale / logits_soft_cap))
            logits = capped * (logits_soft_cap * LOG2_E)
        if slope is not None:
            logits += slope * (key - position[:, None]).astype(jnp.float32)
        if is_masked:
            sees = is_live & (key <= position[:, None])
            if sliding_window is not None:
                sees &= key > position[:, None] - sliding_window
            logits = jnp.where(sees, logits, -jnp.inf)

        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp2(logits - safe_top[:, None])
        rescale = jnp.exp2(top - safe_top)
        total = total * rescale + jnp.sum(weights, axis=1)
        acc = acc * rescale[:, None] + plgpu.dot(weights.astype(q.dtype), v, precision=precision)
        return new_top, total, acc

    carry = (
        jnp.full((query_tile,), -jnp.inf, jnp.float32),
        jnp.zeros((query_tile,), jnp.float32),
        jnp.zeros((query_tile, dim.size), jnp.float32),
    )
    carry = jax.lax.fori_loop(start, masked, functools.partial(attend, is_masked=False), carry)
    top, total, acc = jax.lax.fori_loop(
        masked, end, functools.partial(attend, is_masked=True), carry
    )
    plgpu.store(
        acc_ref.at[split, token[:, None], head[:, None], dim[None, :]], acc, mask=query_mask
    )
    plgpu.store(top_ref.at[split, token, head], top, mask=is_query)
    plgpu.store(total_ref.at[split, token, head], total, mask=is_query)


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
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a few query tokens a row over the blocks of their rows.

    Args:
      q: [T, H, D].
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      block_table: int32 [B, M], -1 for "no block".
      kv_lens: int32 [B].
      cu_q_lens: int32 [B + 1].
      max_query_len: the most query tokens any row brings, at most 8.
      causal: only True is served.
      scale, logits_soft_cap, sliding_window, sinks [H], alibi_slopes [H]: as in
        `paged_kv_jax.paged_attention`.
      interpret: run as ordinary JAX operations, for tests on a CPU.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log.
    """
    if not causal:
        raise ValueError(f"{causal=}; triton serves causal attention only")
    num_tokens, num_heads, head_dim = q.shape
    num_rows, table_width = block_table.shape
    block_size, num_kv_heads = k_pool.shape[2:4]
    query_rows = max_query_len * num_heads // num_kv_heads
    query_tile = min(max(pl.next_power_of_2(query_rows), 16), 64)  # 16: the least a dot takes
    key_tile = 64 if head_dim <= 128 and q.dtype != jnp.float32 else 32
    query_tiles = pl.cdiv(query_rows, query_tile)
    splits = pl.cdiv(TARGET_PROGRAMS, num_kv_heads * query_tiles * num_rows)
    splits = min(splits, MAX_SPLITS, pl.cdiv(table_width * block_size, key_tile))

    partial_shape = (splits, num_tokens, num_heads)
    acc, top, total = pl.pallas_call(
        functools.partial(
            _decode_kernel,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            sliding_window=sliding_window,
            query_tile=query_tile,
            key_tile=key_tile,
        ),
        grid=(num_kv_heads * query_tiles, num_rows, splits),
        out_shape=(
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_kv_decode_triton",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        block_table,
        kv_lens,
        cu_q_lens,
        None if alibi_slopes is None else alibi_slopes.astype(jnp.float32),
        q,
        k_pool,
        v_pool,
    )

    # No program writes the partials of a token that belongs to no row.
    is_token = (jnp.arange(num_tokens) < cu_q_lens[-1])[:, None]
    top = jnp.where(is_token, top, -jnp.inf)
    all_top = jnp.max(top, axis=0)
    if sinks is not None:
        sink = jnp.where(is_token, LOG2_E * sinks.astype(jnp.float32), -jnp.inf)
        all_top = jnp.maximum(all_top, sink)
    all_top = jnp.where(all_top == -jnp.inf, 0.0, all_top)
    weight = jnp.exp2(top - all_top)
    denominator = jnp.sum(jnp.where(is_token, total, 0) * weight, axis=0)
    if sinks is not None:
        denominator += jnp.exp2(sink - all_top)
    acc = jnp.where((weight > 0)[..., None], acc, 0)
    out = jnp.sum(acc * weight[..., None], axis=0)
    out /= jnp.where(denominator > 0, denominator, 1)[..., None]
    lse = all_top / LOG2_E + jnp.log(denominator)
    return out.astype(q.dtype), lse


def _write_kernel(layer_ref, slots_ref, k_ref, v_ref, *refs, tile: int):
    k_pool_ref, v_pool_ref = refs[2:]  # the first two are the same memory, as inputs
    token = pl.program_id(0)
    element = pl.program_id(1) * tile + jnp.arange(tile)
    slot = slots_ref[token]
    is_live = (slot >= 0) & (slot < k_pool_ref.shape[1])
    mask = (element < k_ref.shape[1]) & is_live
    for new_ref, pool_ref in ((k_ref, k_pool_ref), (v_ref, v_pool_ref)):
        new = plgpu.load(new_ref.at[token, element], mask=mask, other=0)
        target = pool_ref.at[layer_ref[0], slot, element]
        plgpu.store(target, new.astype(pool_ref.dtype), mask=mask)


def write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Put each token's K and V into its slot of one layer, both in one launch.

    Args:
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      k, v: [T, K, D]; cast to the pools' dtype.
      slots: int32 [T], `block * P + offset`; slots outside [0, N * P) are dropped.
      interpret: run as ordinary JAX operations, for tests on a CPU.

    Returns:
      The pools, updated in place where they are donated or carried by a loop.
    """
    num_layers, num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    num_tokens, row_size = k.shape[0], num_kv_heads * head_dim
    flat_pool = (num_layers, num_blocks * block_size, row_size)
    tile = min(pl.next_power_of_2(row_size), 1024)
    pools = pl.pallas_call(
        functools.partial(_write_kernel, tile=tile),
        grid=(num_tokens, pl.cdiv(row_size, tile)),
        out_shape=[jax.ShapeDtypeStruct(flat_pool, pool.dtype) for pool in (k_pool, v_pool)],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_kv_write_triton",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        slots,
        k.reshape(num_tokens, row_size),
        v.reshape(num_tokens, row_size),
        k_pool.reshape(flat_pool),
        v_pool.reshape(flat_pool),
    )
    return tuple(pool.reshape(k_pool.shape) for pool in pools)
