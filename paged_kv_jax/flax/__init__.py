"""Attention over a paged cache as a module of Flax. Needs the extra: pip install "paged_kv_jax[flax]".

`paged_kv_jax.flax.nnx.PagedAttention` stands where a model has `flax.nnx.MultiHeadAttention`, and
`paged_kv_jax.flax.linen.PagedAttention` where it has `flax.linen.MultiHeadDotProductAttention`. Both
keep those modules' argument and parameter names, so that trained weights fit as they are.
"""

try:
    from paged_kv_jax.flax import linen, nnx
    from paged_kv_jax.flax.common import PositionEmbedding, rotary_embedding
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        'flax is missing: pip install "paged_kv_jax[flax]"', name=error.name
    ) from error

__all__ = ["PositionEmbedding", "linen", "nnx", "rotary_embedding"]
