"""Paged attention for NVIDIA Hopper: the decode kernel, the prefill kernel, or one after the other.

Which rows a batch has is data, which kernels are launched is not. So a batch whose shape allows both
kinds of rows is two launches, each over its own rows: the decode kernel's over a copy of the few
tokens that are its, whose outputs are then put among those of prefill. One row, or as many tokens in
each, is no such batch.
"""

import jax
import jax.numpy as jnp

from . import decode_mosaic_gpu as decode
from . import prefill_mosaic_gpu as prefill

# In a batch with longer rows, those with as many query tokens are decode. With 8, the decode kernel's
# columns are there for 8 in each row: 64 rows of 4,096 tokens with one query each, beside two prompts of
# 2,048, took 716 us on an H200, and 455 with 1.
DECODE_QUERY_LEN = 1


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
    kernel = decode if _is_decode(max_query_len, causal) else prefill
    return kernel.paged_attention_unsupported_reason(
        q,
        k_pool,
        max_query_len=max_query_len,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        causal=causal,
        compute_capability=compute_capability,
    )


def _is_decode(max_query_len: int, causal: bool) -> bool:
    return causal and max_query_len <= decode.MAX_QUERY_LEN


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
) -> tuple[jax.Array, jax.Array]:
    """Attention of ragged query tokens over the blocks of their rows.

    Args:
      q: [T, H, D] bfloat16 or float16, the rows' query tokens one after another.
      k_pool, v_pool: [L, N, P, K, D] of q's dtype; query head h belongs to KV head h // (H // K).
      layer: int32 [], may be traced.
      block_table: int32 [B, M]; entries that no query of the row sees are not read.
      kv_lens: int32 [B], tokens of each row, its query tokens included; 0: takes no part.
      cu_q_lens: int32 [B + 1]; row b has query tokens cu_q_lens[b] to cu_q_lens[b + 1] - 1.
      max_query_len: no row has more query tokens.
      scale, logits_soft_cap, sliding_window, sinks [H], alibi_slopes [H], causal: as in
        `prefill_mosaic_gpu.paged_attention`.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log.
    """
    options = dict(
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    pools = k_pool, v_pool, layer, block_table
    if _is_decode(max_query_len, causal):
        return decode.paged_attention(
            q, *pools, kv_lens, cu_q_lens, max_query_len=max_query_len, **options
        )
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    is_mixed = causal and num_rows > 1 and num_rows * max_query_len > num_tokens
    out, lse = prefill.paged_attention(
        q,
        *pools,
        kv_lens,
        cu_q_lens,
        max_query_len=max_query_len,
        causal=causal,
        min_query_len=DECODE_QUERY_LEN + 1 if is_mixed else 1,
        **options,
    )
    if not is_mixed:
        return out, lse
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    # Each row's last tokens. A row with fewer, or with more, has others among them: nobody reads
    # what those get.
    token = cu_q_lens[1:, None] + jnp.arange(-DECODE_QUERY_LEN, 0, dtype=jnp.int32)
    is_row = q_lens <= DECODE_QUERY_LEN
    is_token = is_row[:, None] & (token >= cu_q_lens[:-1, None])
    token = token.reshape(-1)
    few_out, few_lse = decode.paged_attention(
        q[jnp.maximum(token, 0)],
        *pools,
        jnp.where(is_row & (q_lens > 0), kv_lens, 0),
        jnp.arange(num_rows + 1, dtype=jnp.int32) * DECODE_QUERY_LEN,
        max_query_len=DECODE_QUERY_LEN,
        **options,
    )
    place = jnp.where(is_token.reshape(-1), token, num_tokens)
    out = out.at[place].set(few_out, mode="drop", unique_indices=True)
    return out, lse.at[place].set(few_lse, mode="drop", unique_indices=True)
