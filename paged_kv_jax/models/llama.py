"""Llama-architecture decoder in Flax NNX over a paged KV cache: Llama 2/3, Qwen2/3, Mistral, SmolLM2.

Shapes, besides the package's letters: E hidden_size, F intermediate_size, V vocab_size. The modules
and their parameters carry the names of Hugging Face checkpoints (less the leading "model."), so a
checkpoint tensor's name is a parameter's path.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_kv_jax.attention import paged_attention
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.plan import Plan
from paged_kv_jax.pool import KVPool, write


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Architecture of a model; hashable and static.

    Attributes:
      vocab_size: V.
      hidden_size: E, width of the residual stream.
      intermediate_size: F, width of the feed-forward layers.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: K, key/value heads; divides H.
      head_dim: D, even.
      max_position: positions the model was trained for.
      rope_theta: base of the rotary frequencies.
      rope_factors: divisors of the D // 2 rotary frequencies (context extension); () for none.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: the output projection is the embedding table.
      qkv_bias: q, k and v projections have a bias (Qwen2).
      qk_norm: RMSNorm over each head's q and k before RoPE (Qwen3).
      sliding_window: keys each query sees, its own included (Mistral); None for all.

    Raises:
      ValueError: a field has a value that cannot work; the message names it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name}={value!r} must be an int of at least 1")
            if field.type is float and not value > 0:
                raise ValueError(f"{field.name}={value!r} must be a positive number")
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{field.name}={value!r} must be True or False")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, since RoPE turns pairs")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_factors has {len(self.rope_factors)} entries; head_dim={self.head_dim} "
                f"takes {self.head_dim // 2}, or none"
            )
        if not all(factor > 0 for factor in self.rope_factors):
            raise ValueError(f"rope_factors={self.rope_factors} must be positive")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be None or at least 1")

    def kv_cache_config(
        self,
        *,
        num_blocks: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        block_size: int = 16,
        dtype: Any = jnp.bfloat16,
    ) -> KVCacheConfig:
        """The geometry of a paged KV cache for this model."""
        return KVCacheConfig(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            max_seqs=max_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
            dtype=dtype,
        )


def llama3_rope_factors(
    head_dim: int,
    rope_theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> tuple[float, ...]:
    """The `rope_factors` of Llama 3.1's context extension.

    Wavelengths above original_max_position / low_freq_factor are stretched by `factor`, those below
    original_max_position / high_freq_factor are kept, those between are blended.
    """
    frequencies = rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position * frequencies / (2 * np.pi)  # within the original context
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return tuple((1.0 / (keep + (1.0 - keep) / factor)).tolist())


def rotary_angles(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, D // 2], for int32 positions [...]; the 1 stands for the heads."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_factors:
        frequencies = frequencies / np.asarray(config.rope_factors)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[..., i], x[..., i + D // 2]) of x [..., heads, D] (RoFormer, half-split)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] in the weight's dtype; float32 [..., out] comes out."""
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """y = x W^T + b, accumulated in float32, in x's dtype.

    The weight is [out, in], as checkpoints store it: a row per output, read in one sweep at decode.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        scale = inputs**-0.5
        draw = jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32)
        self.weight = nnx.Param((scale * draw).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        y = _project(x, self.weight[...])
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, dtype: Any):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shape and dtype stay."""
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """Token embeddings, weight [V, E]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: Any, rngs: nnx.Rngs):
        draw = jax.random.normal(rngs.params(), (vocab_size, hidden_size), jnp.float32)
        self.weight = nnx.Param(draw.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] -> [..., E]; a token past the vocabulary gives NaN, never another token's row."""
        return self.weight[...].at[tokens].get(mode="fill", wrap_negative_indices=False)


class Attention(nnx.Module):
    """The projections around attention; the caller attends, over whichever cache it keeps."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        width, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        kinds: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        bias = config.qkv_bias
        self.head_dim = width
        self.q_proj = Linear(config.hidden_size, heads * width, bias=bias, **kinds)
        self.k_proj = Linear(config.hidden_size, kv_heads * width, bias=bias, **kinds)
        self.v_proj = Linear(config.hidden_size, kv_heads * width, bias=bias, **kinds)
        self.o_proj = Linear(heads * width, config.hidden_size, bias=False, **kinds)
        self.q_norm = RMSNorm(width, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(width, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None

    def qkv(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [..., E] -> q [..., H, D], k [..., K, D] (both turned to their positions), v [..., K, D]."""
        q, k, v = (
            project(x).reshape(*x.shape[:-1], -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


class MLP(nnx.Module):
    """SwiGLU feed-forward layer (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        kinds: dict[str, Any] = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, **kinds)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, **kinds)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] -> [..., E]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One pre-norm layer, cut at attention: `qkv`, then the caller attends, then `finish`."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, dtype=dtype
        )
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def qkv(
        self, hidden: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """hidden [..., E] -> q [..., H, D], k [..., K, D], v [..., K, D]."""
        return self.self_attn.qkv(self.input_layernorm(hidden), cos, sin)

    def finish(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """The layer's hidden [..., E] after its attention's output [..., H, D] is known."""
        hidden += self.self_attn.o_proj(attended.reshape(*hidden.shape[:-1], -1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(nnx.Module):
    """The model: a pytree, so it may be an argument of `jax.jit`.

    Each layer keeps arrays of its own and the loop over layers is unrolled: a scan over stacked
    weights copies each layer's slice on the CPU before it multiplies (SmolLM2 decode: 44 ms instead
    of 33 ms a token), and saves only compile time.
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        """A model with random weights.

        Args:
          config: the architecture.
          dtype: of all weights and activations; sums are taken in float32.
          rngs: `nnx.Rngs(seed)`.
        """
        kinds: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **kinds)
        self.layers = nnx.List([DecoderLayer(config, **kinds) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, **kinds)
        )

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, pool: KVPool, plan: Plan
    ) -> tuple[jax.Array, KVPool]:
        """One step over ragged tokens: writes their K and V into the pool and attends over it.

        Args:
          tokens: int32 [T], rows one after the other as the plan packs them; what stands where the
            plan has no token does not matter.
          positions: int32 [T], each token's position in its sequence (`plan.positions`).
          pool: K and V of all earlier tokens.
          plan: of this step, from `make_plan` or `plan_from_tables`.

        Returns:
          hidden [T, E] in the weights' dtype, normed, ready for `logits`; and the updated pool.
        """
        cos, sin = rotary_angles(self.config, positions)
        hidden = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.qkv(hidden, cos, sin)
            pool = write(pool, index, k, v, plan)
            attended = paged_attention(
                q,
                pool,
                index,
                plan,
                scale=self.config.head_dim**-0.5,
                sliding_window=self.config.sliding_window,
            )
            hidden = layer.finish(hidden, attended)
        return self.norm(hidden), pool

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> float32 logits [..., V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return _project(hidden, head.weight[...])


def from_weights(
    config: LlamaConfig, weights: Iterable[tuple[str, np.ndarray]], dtype: Any
) -> Llama:
    """A model from (name, array) pairs, one at a time, so that only one is held twice.

    Args:
      config: the architecture.
      weights: names are parameter paths such as "layers.0.self_attn.q_proj.weight".
      dtype: the weights are cast to it.

    Raises:
      ValueError: a weight is missing, unknown, repeated or of the wrong shape.
    """
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    missing = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    params = dict(nnx.to_flat_state(state))
    for name, array in weights:
        if name not in missing:
            raise ValueError(f"weight {name!r} is repeated or has no place in {config}")
        path = missing.pop(name)
        expected = params[path].shape
        if array.shape != expected:
            raise ValueError(
                f"weight {name!r} has shape {array.shape}; the config takes {expected}"
            )
        params[path] = params[path].replace(jnp.asarray(array.astype(dtype)))
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, such as {next(iter(missing))!r}")
    return nnx.merge(graphdef, nnx.from_flat_state(params))
