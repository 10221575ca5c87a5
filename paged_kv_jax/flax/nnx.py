"""`PagedAttention` for Flax NNX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from paged_kv_jax.flax import common
from paged_kv_jax.plan import Plan
from paged_kv_jax.pool import KVPool

default_kernel_init = nnx.initializers.lecun_normal()
default_bias_init = nnx.initializers.zeros_init()


class PagedAttention(nnx.Module):
    """Causal multi-head self-attention over a paged cache, in place of `nnx.MultiHeadAttention`.

    Projects x to queries, keys and values, writes the keys and values into the pool, attends over
    the blocks that the plan names, and projects back. Names of arguments and parameters, and the
    layout of the parameters, are those of `nnx.MultiHeadAttention`: `nnx.update(paged,
    nnx.state(trained, nnx.Param))` takes over its weights.

    Sinks, ALiBi and other norms of queries and keys are not here: a module that needs them calls
    `paged_kv_jax.write` and `paged_kv_jax.paged_attention` itself, as this one does.

    Attributes:
      query: E -> [H, D].
      key: E -> [K, D].
      value: E -> [K, D].
      query_ln: LayerNorm over D, or None; `key_ln` likewise.
      out: [H, D] -> out_features.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        normalize_qk: bool = False,
        position_embedding: common.PositionEmbedding | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """A module with random weights.

        Args:
          num_heads: H, query heads.
          in_features: E, elements of each token of x.
          qkv_features: H * D; `in_features` if None.
          out_features: elements of each token of the result; `in_features` if None.
          num_kv_heads: K, key/value heads (grouped-query attention); `num_heads` if None.
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
          rngs: `nnx.Rngs(seed)`.

        Raises:
          ValueError: the heads do not divide as they must.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        head_dim = common.check_heads(num_heads, num_kv_heads, qkv_features)
        self.in_features = in_features
        self.position_embedding = position_embedding
        self.attention_options: dict[str, Any] = dict(
            scale=scale, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
            implementation=implementation,
        )  # fmt: skip
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs,
        )  # fmt: skip
        inits: dict[str, Any] = dict(kernel_init=kernel_init, bias_init=bias_init)
        self.query = linear(in_features, (num_heads, head_dim), **inits)
        self.key = linear(in_features, (num_kv_heads, head_dim), **inits)
        self.value = linear(in_features, (num_kv_heads, head_dim), **inits)
        norm = functools.partial(
            nnx.LayerNorm, head_dim,
            use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
        )  # fmt: skip
        self.query_ln = norm() if normalize_qk else None
        self.key_ln = norm() if normalize_qk else None
        self.out = linear(
            (num_heads, head_dim),
            out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )

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
        """
        common.check_input(x, self.in_features)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        out, pool = common.attend(
            q, k, v, positions, pool, plan, layer,
            position_embedding=self.position_embedding, **self.attention_options,
        )  # fmt: skip
        return self.out(out), pool
