"""Paged attention, dense and obviously right: the meaning that every implementation is held to.

Gathers each row's whole table and forms all scores at once. In float64 where JAX has it enabled.
"""

import jax
import jax.numpy as jnp


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
) -> tuple[jax.Array, jax.Array]:
    """Attention of ragged query tokens over the blocks of their rows.

    Args:
      q: [T, H, D].
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      block_table: int32 [B, M], -1 for "no block".
      kv_lens: int32 [B].
      cu_q_lens: int32 [B + 1].
      max_query_len: unused here; other implementations choose their tiles by it.
      scale, causal, logits_soft_cap, sliding_window, sinks [H], alibi_slopes [H]: as in
        `paged_kv_jax.paged_attention`.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log.
    """
    if not causal and (sliding_window is not None or alibi_slopes is not None):
        raise ValueError(
            f"causal=False with {sliding_window=} or alibi_slopes; neither goes with it"
        )
    del max_query_len
    num_tokens, num_heads, head_dim = q.shape
    num_rows, block_size, num_kv_heads = kv_lens.shape[0], k_pool.shape[2], k_pool.shape[3]
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # pyright: ignore[reportAttributeAccessIssue]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    is_token = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = kv_lens[row] - (cu_q_lens[row + 1] - cu_q_lens[row]) + token - cu_q_lens[row]
    if not causal:
        position = kv_lens[row] - 1  # as far as anyone sees

    key_position = jnp.arange(block_table.shape[1] * block_size, dtype=jnp.int32)
    sees = is_token[:, None] & (key_position <= position[:, None])  # [T, M * P]
    sees &= key_position < kv_lens[row][:, None]
    sees &= jnp.repeat(block_table >= 0, block_size, axis=1)[row]
    if sliding_window is not None:
        sees &= key_position > position[:, None] - sliding_window

    def rows_of(pool: jax.Array) -> jax.Array:  # [T, M * P, K, D]
        dense = pool[layer, jnp.maximum(block_table, 0)].astype(wide)
        dense = dense.reshape(num_rows, -1, num_kv_heads, head_dim)[row]
        return jnp.where(sees[:, :, None, None], dense, 0)

    grouped = q.astype(wide).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, rows_of(k_pool), precision="highest")
    scores = scores.reshape(num_tokens, num_heads, -1) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if alibi_slopes is not None:
        distance = (key_position - position[:, None]).astype(wide)
        scores += alibi_slopes.astype(wide)[:, None] * distance[:, None, :]
    scores = jnp.where(sees[:, None, :], scores, -jnp.inf)

    top = jnp.max(scores, axis=-1)
    if sinks is not None:
        sink = jnp.where(is_token[:, None], sinks.astype(wide), -jnp.inf)
        top = jnp.maximum(top, sink)
    safe_top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - safe_top[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sink - safe_top)
    weights = weights / jnp.where(total > 0, total, 1)[..., None]
    weights = weights.reshape(num_tokens, num_kv_heads, -1, weights.shape[-1])
    out = jnp.einsum("tkgs,tskd->tkgd", weights, rows_of(v_pool), precision="highest")
    lse = safe_top + jnp.log(total)
    return out.reshape(q.shape).astype(q.dtype), lse.astype(jnp.float32)
