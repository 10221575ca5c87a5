"""The same models over contiguous caches: what the paged cache is compared with.

Shapes, besides the package's letters: Q tokens a row brings, C positions of a cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paged_kv_jax.models.llama import Llama, LlamaConfig, rotary_angles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ContiguousCache:
    """One pair of caches per layer, as long as the longest sequence may become.

    Attributes:
      k: L arrays [B, C, K, D].
      v: L arrays [B, C, K, D].
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def init_cache(
    config: LlamaConfig, batch: int, max_len: int, dtype: Any = jnp.float32
) -> ContiguousCache:
    """An empty cache for `batch` rows of up to `max_len` tokens."""
    shape = (batch, max_len, config.num_kv_heads, config.head_dim)

    def layers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return ContiguousCache(k=layers(), v=layers())


def contiguous_forward(
    model: Llama, tokens: jax.Array, start: jax.Array, cache: ContiguousCache
) -> tuple[jax.Array, ContiguousCache]:
    """One step over a rectangular batch.

    Args:
      model: the weights.
      tokens: int32 [B, Q].
      start: int32 [B], tokens each row has in the cache already; start + Q must not pass C.
      cache: K and V of those tokens.

    Returns:
      hidden [B, Q, E], ready for `model.logits`, and the cache with the new tokens in it.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    cos, sin = rotary_angles(model.config, positions)
    hidden = model.embed_tokens(tokens)
    caches = []
    for layer, k_cache, v_cache in zip(model.layers, cache.k, cache.v, strict=True):
        q, k, v = layer.qkv(hidden, cos, sin)
        k_cache, v_cache = _insert(k_cache, k, start), _insert(v_cache, v, start)
        attended = _attend(q, k_cache, v_cache, positions, model.config.sliding_window)
        hidden = layer.finish(hidden, attended)
        caches.append((k_cache, v_cache))
    k_caches, v_caches = zip(*caches, strict=True)
    return model.norm(hidden), ContiguousCache(k=k_caches, v=v_caches)


def _insert(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Puts new [B, Q, K, D] into cache [B, C, K, D] from position start [B] on."""
    insert = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=0))
    return insert(cache, new.astype(cache.dtype), start)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Causal attention of q [B, Q, H, D] at `positions` [B, Q] over k, v [B, C, K, D]."""
    batch, num_queries, heads, width = q.shape
    grouped = q.reshape(batch, num_queries, k.shape[2], -1, width)
    scores = jnp.einsum("bqkgd,bckd->bkgqc", grouped, k, preferred_element_type=jnp.float32)
    age = positions[:, :, None] - jnp.arange(k.shape[1])  # [B, Q, C]
    visible = age >= 0 if window is None else (age >= 0) & (age < window)
    scores = jnp.where(visible[:, None, None], scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgqc,bckd->bqkgd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch, num_queries, heads, width)
