"""What the NNX and the Linen module share: everything but their parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.attention import paged_attention
from paged_kv_jax.models.llama import apply_rotary
from paged_kv_jax.plan import Plan
from paged_kv_jax.pool import KVPool, write

PositionEmbedding = Callable[[jax.Array, jax.Array], jax.Array]
"""Queries or keys [T, heads, D] and their positions int32 [T] -> the same shape and dtype."""


def rotary_embedding(x: jax.Array, positions: jax.Array, *, theta: float = 10000.0) -> jax.Array:
    """Rotary position embedding (RoFormer; Su et al., 2021) over halves: dimensions i and i + D / 2.

    Args:
      x: [T, heads, D], queries or keys; D is even.
      positions: int32 [T].
      theta: base of the frequencies; `functools.partial(rotary_embedding, theta=5e5)` sets it.

    Returns:
      [T, heads, D], in x's dtype.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"head_dim={width} must be even, since rotary embedding turns pairs")
    frequencies = jnp.asarray(theta ** (-np.arange(0, width, 2) / width), jnp.float32)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    return apply_rotary(x, jnp.cos(angles), jnp.sin(angles))


def check_heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> int:
    """The elements of a head, D.

    Raises:
      ValueError: the heads do not divide as they must.
    """
    if qkv_features % num_heads:
        raise ValueError(f"{qkv_features=} must be a multiple of {num_heads=}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    return qkv_features // num_heads


def check_input(x: jax.Array, in_features: int | None = None) -> None:
    """Raise a ValueError unless x is [T, E]."""
    if x.ndim != 2 or in_features not in (None, x.shape[1]):
        raise ValueError(
            f"x has shape {x.shape}; it must be [T, {in_features or 'E'}]: the query tokens of the "
            "plan one after another, without a batch axis"
        )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    pool: KVPool,
    plan: Plan,
    layer: jax.Array | int,
    *,
    position_embedding: PositionEmbedding | None,
    scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    implementation: str | None,
) -> tuple[jax.Array, KVPool]:
    """Embed the positions, write the keys and values, attend: q [T, H, D], k and v [T, K, D]."""
    if position_embedding is not None:
        q, k = position_embedding(q, positions), position_embedding(k, positions)
    pool = write(pool, layer, k, v, plan)
    out = paged_attention(
        q, pool, layer, plan,
        scale=scale, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )  # fmt: skip
    return out, pool
