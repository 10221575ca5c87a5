"""Attention of a step's query tokens over the blocks of their sequences."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from paged_kv_jax import dispatch
from paged_kv_jax.cascade import merge_attention_states
from paged_kv_jax.config import POOL_DTYPES
from paged_kv_jax.plan import Plan
from paged_kv_jax.pool import KVPool


@overload
def paged_attention(
    q: jax.Array, pool: KVPool, layer: jax.Array | int, plan: Plan, *,
    scale: float | None = ..., causal: bool = ..., logits_soft_cap: float | None = ...,
    sliding_window: int | None = ..., sinks: jax.Array | None = ..., alibi_slopes: jax.Array | None = ...,
    return_lse: Literal[False] = ..., implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    q: jax.Array, pool: KVPool, layer: jax.Array | int, plan: Plan, *,
    scale: float | None = ..., causal: bool = ..., logits_soft_cap: float | None = ...,
    sliding_window: int | None = ..., sinks: jax.Array | None = ..., alibi_slopes: jax.Array | None = ...,
    return_lse: Literal[True], implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
def paged_attention(
    q: jax.Array,
    pool: KVPool,
    layer: jax.Array | int,
    plan: Plan,
    *,
    scale: float | None = None,
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Attention of ragged query tokens over paged keys and values.

    Computes, for each query token and head, with keys and values of the token's own sequence,

    $$\mathrm{softmax}\left(\mathrm{cap}\left(\mathrm{scale} \cdot q K^T\right) + \mathrm{bias}\right) V$$

    A query sees the keys at positions up to its own, or all of its sequence's with `causal=False`; a
    query with nothing to see, and a token place without a token, yields 0 and a log-sum-exp of -inf,
    so that merging partial results is exact. Slots that hold no live token are never seen, whatever
    is in them. Softmax and accumulation are float32. Query heads `g * G` to `g * G + G - 1` share kv
    head g (grouped-query attention; Ainslie et al., 2023).

    With a plan that looked for shared prefixes (`make_plan(..., shared_prefix=True)`), the queries of
    all rows of a group attend to their common prefix in one pass, to the rest in a second, and both
    are merged; the output is rounded once more. Calls with `sliding_window` or `alibi_slopes`
    attend row by row, as with any other plan.

    Letters: T query tokens, H query heads, K kv heads, G = H // K, D head_dim, L layers.

    Args:
      q: [T, H, D]; bfloat16, float16 or float32.
      pool: keys and values; this step's are already written (`paged_kv_jax.write`).
      layer: int32 [], in [0, L), may be traced.
      plan: the step's plan.
      scale: factor of the logits; 1 / sqrt(D) if not given.
      causal: False lets each query see all keys of its row: attention to an encoder's keys, or among
        the tokens of an image. A plan's rows have at least as many keys as query tokens. Goes with
        neither `sliding_window` nor `alibi_slopes`.
      logits_soft_cap: c > 0: logits become `c * tanh(logits / c)`, before masks and ALiBi.
      sliding_window: w >= 1: a query sees w keys at most, its own position's included.
      sinks: float [H]: a logit per head that takes part in the softmax's denominator alone (Xiao et
        al., 2023), and in the log-sum-exp.
      alibi_slopes: float [H]: adds `slope * (key position - query position)` to the logits (Press et
        al., 2021).
      return_lse: also return the log-sum-exp of each query's logits.
      implementation: "mosaic_gpu", "triton", "xla" or "reference" (see the README's table); None picks
        the best that supports the call.

    Returns:
      [T, H, D] in q's dtype; with `return_lse` also float32 [T, H], natural log.

    Raises:
      ValueError, TypeError: shapes, dtypes or options that cannot work.
      NotImplementedError: the implementation asked for cannot serve the call; the message says why.
    """
    _check(q, pool, plan, causal, logits_soft_cap, sliding_window, sinks, alibi_slopes)
    options: dict[str, Any] = dict(
        causal=causal,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states = []
    for rows, settings in _passes(plan, options):
        attend = dispatch.choose("paged_attention", implementation, q, pool.k, **settings)
        states.append(attend(q, pool.k, pool.v, layer, *rows, scale=scale, **settings))
    if len(states) == 1:
        [(out, lse)] = states
    else:
        (prefix_out, prefix_lse), own = states
        # Places without a token lie within groups.
        prefix_lse = jnp.where((plan.token_rows >= 0)[:, None], prefix_lse, -jnp.inf)
        out, lse = merge_attention_states(prefix_out, prefix_lse, *own)
    return (out, lse) if return_lse else out


def supports(
    name: str,
    q: jax.Array | jax.ShapeDtypeStruct,
    pool: KVPool,
    plan: Plan,
    *,
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[bool, str]:
    """Whether implementation `name` of `paged_attention` can serve a call here, and why not.

    Nothing is computed: shapes and dtypes count, so `jax.ShapeDtypeStruct` leaves will do.

    Args:
      name: an implementation.
      q, pool, plan, options: as for `paged_attention`.

    Returns:
      (True, "") or (False, reason).

    Raises:
      ValueError: there is no such implementation.
    """
    options: dict[str, Any] = dict(
        causal=causal,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    for _, settings in _passes(plan, options):
        reason = dispatch.unsupported_reason("paged_attention", name, q, pool.k, **settings)
        if reason is not None:
            return False, reason
    return True, ""


def _passes(
    plan: Plan, options: dict[str, Any]
) -> list[tuple[tuple[jax.Array, ...], dict[str, Any]]]:
    """The kernel calls of an attention: (block_table, kv_lens, cu_q_lens) and keyword arguments.

    One, or two whose results are to be merged: what rows have in common, and each row's own. Both are
    made also where nothing turns out to be shared: on a GPU, a pass over nothing takes less than a
    condition, whose value XLA would have the host read.
    """
    settings = dict(max_query_len=plan.max_query_len, **options)
    shared = plan.shared_prefix
    # Windows and slopes reckon with distances, which the pass over a prefix does not know.
    needs_distances = options["sliding_window"] is not None or options["alibi_slopes"] is not None
    if shared is None or needs_distances:
        return [((plan.block_table, plan.kv_lens, plan.cu_q_lens), settings)]
    sees_all = dict(max_query_len=plan.num_tokens, causal=False, sinks=None)
    return [
        ((shared.block_table, shared.kv_lens, shared.cu_q_lens), settings | sees_all),
        ((shared.own_block_table, shared.own_kv_lens, plan.cu_q_lens), settings),
    ]


def _check(
    q: jax.Array,
    pool: KVPool,
    plan: Plan,
    causal: bool,
    logits_soft_cap: float | None,
    sliding_window: int | None,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
) -> None:
    """What is wrong with a call is said where it is traced, one fact per line."""
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; it must be [T, H, D]")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pool.k.shape[3]
    if q.dtype.name not in POOL_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; it must be one of {POOL_DTYPES}")
    if num_tokens != plan.num_tokens:
        raise ValueError(f"q has T={num_tokens} tokens and the plan {plan.num_tokens}; must agree")
    if head_dim != pool.k.shape[4]:
        raise ValueError(f"q has head_dim={head_dim} and the pool {pool.k.shape[4]}; must agree")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has H={num_heads} heads; it must be a multiple of K={num_kv_heads}")
    if plan.block_size != pool.block_size:
        raise ValueError(
            f"the plan has block_size={plan.block_size} and the pool {pool.block_size}; must agree"
        )
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap={logits_soft_cap} must be above 0, or None")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} must be at least 1, or None")
    if not causal and (sliding_window is not None or alibi_slopes is not None):
        which = "alibi_slopes" if sliding_window is None else f"{sliding_window=}"
        raise ValueError(f"causal=False does not go with {which}: both reckon back from the query")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is None:
            continue
        if per_head.shape != (num_heads,):
            raise ValueError(f"{name} has shape {per_head.shape}; it must be [H] = ({num_heads},)")
        if not jnp.issubdtype(per_head.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {per_head.dtype}; it must be floating-point")
