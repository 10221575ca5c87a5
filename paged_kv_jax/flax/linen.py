"""`PagedAttention` for Flax Linen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from paged_kv_jax.flax import common
from paged_kv_jax.plan import Plan
from paged_kv_jax.pool import KVPool


class PagedAttention(nn.Module):
    """Causal multi-head self-attention over a paged cache, in place of `nn.MultiHeadDotProductAttention`.

    Projects x to queries, keys and values, writes the keys and values into the pool, attends over
    the blocks that the plan names, and projects back. Names of arguments and parameters, and the
    layout of the parameters, are those of `nn.MultiHeadDotProductAttention`, so its trained
    `params` fit. The pool is an argument and a result, not a variable collection.

    Sinks, ALiBi and other norms of queries and keys are not here: a module that needs them calls
    `paged_kv_jax.write` and `paged_kv_jax.paged_attention` itself, as this one does.

    Attributes:
      num_heads: H, query heads.
      num_kv_heads: K, key/value heads (grouped-query attention); `num_heads` if None.
      qkv_features: H * D; the elements of each token of x if None.
      out_features: elements of each token of the result; as many as x has if None.
      dtype: of the computation; None infers it from x and the parameters.
      param_dtype: of the parameters.
      precision: of the projections; see `jax.lax.Precision`.
      kernel_init: initialiser of the projections' kernels.
      out_kernel_init: of the last projection's kernel; `kernel_init` if None.
      bias_init: initialiser of the biases.
      out_bias_init: of the last projection's bias; `bias_init` if None.
      use_bias: whether the four projections have biases.
      normalize_qk: whether each head's query and key pass a LayerNorm without bias.
      position_embedding: applied to queries and to keys, such as
        `paged_kv_jax.flax.rotary_embedding`; None for none.
      scale: of the logits; D ** -0.5 if None.
      sliding_window: keys each query sees, its own included; None for all.
      logits_soft_cap: c in c * tanh(logits / c); None for none.
      implementation: of attention; None picks the best that supports the call.
    """

    num_heads: int
    num_kv_heads: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    normalize_qk: bool = False
    position_embedding: common.PositionEmbedding | None = None
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        pool: KVPool,
        plan: Plan,
        layer: jax.Array | int,
    ) -> tuple[jax.Array, KVPool]:
        """Attend from x's tokens to all tokens of their sequences, their own included.

        Args:
          x: [T, E], one row per query token of the plan.
          positions: int32 [T], for `position_embedding`; what is visible follows from the plan.
          pool: keys and values of all earlier tokens.
          plan: the step's plan.
          layer: int32 [], in [0, L), may be traced: this module's layer of the pool.

        Returns:
          [T, out_features], and the pool with x's keys and values written.

        Raises:
          ValueError: the heads do not divide as they must.
        """
        common.check_input(x)
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        qkv_features = x.shape[-1] if self.qkv_features is None else self.qkv_features
        head_dim = common.check_heads(self.num_heads, num_kv_heads, qkv_features)
        kinds: dict[str, Any] = dict(
            dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision,
            use_bias=self.use_bias,
        )  # fmt: skip
        dense = functools.partial(
            nn.DenseGeneral, **kinds, kernel_init=self.kernel_init, bias_init=self.bias_init
        )
        q = dense((self.num_heads, head_dim), name="query")(x)
        k = dense((num_kv_heads, head_dim), name="key")(x)
        v = dense((num_kv_heads, head_dim), name="value")(x)
        if self.normalize_qk:
            norm = functools.partial(
                nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            q, k = norm(name="query_ln")(q), norm(name="key_ln")(k)
        out, pool = common.attend(
            q, k, v, positions, pool, plan, layer,
            position_embedding=self.position_embedding, scale=self.scale,
            sliding_window=self.sliding_window, logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
        )  # fmt: skip
        y = nn.DenseGeneral(
            x.shape[-1] if self.out_features is None else self.out_features,
            axis=(-2, -1),
            **kinds,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(out)
        return y, pool
