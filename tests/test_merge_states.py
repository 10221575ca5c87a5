"""Merged partial attention against a dense float64 softmax over all keys at once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv

T, H, D = 5, 3, 8
merge = jax.jit(pkv.merge_attention_states)


def dense(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 attention of logits [T, H, keys] over values [keys, H, D]."""
    if logits.shape[-1] == 0:
        return np.zeros((T, H, D)), np.full((T, H), -np.inf)
    top = logits.max(axis=-1)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(axis=-1)
    return np.einsum("ths,shd->thd", weights / total[..., None], values), top + np.log(total)


def states(*sizes: int, magnitude: float = 1.0, dtype: str = "float32", seed: int = 0):
    """Partial results over parts of some keys, rounded to their dtypes, and the exact whole."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((T, H, sum(sizes))) * magnitude
    values = rng.standard_normal((sum(sizes), H, D))
    ends = np.cumsum(sizes)
    parts = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        out, lse = dense(logits[..., start:end], values[start:end])
        parts.append((jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)))
    return parts, dense(logits, values)


def assert_equal_states(state, other) -> None:
    for x, y in zip(state, other, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 60), (300, 2)])
def test_two_parts_are_the_softmax_over_both(sizes, magnitude: float):
    (a, b), (out, lse) = states(*sizes, magnitude=magnitude)
    merged, merged_lse = merge(*a, *b)
    np.testing.assert_allclose(merged, out, rtol=1e-6, atol=2e-3 if magnitude > 1 else 1e-6)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)
    assert merged.dtype == merged_lse.dtype == jnp.float32


def test_an_empty_part_changes_no_bit_whatever_its_output():
    (part, empty), _ = states(7, 0)
    assert_equal_states(merge(*part, *empty), part)
    assert_equal_states(merge(*empty, *part), part)
    nan = jnp.full_like(empty[0], jnp.nan)
    assert_equal_states(merge(nan, empty[1], *part), part)


def test_parts_may_be_empty_token_by_token():
    (a, b), _ = states(7, 9)
    is_empty = jnp.arange(T)[:, None] % 2 == 0
    a = jnp.where(is_empty[..., None], 0, a[0]), jnp.where(is_empty, -jnp.inf, a[1])
    out, lse = merge(*a, *b)
    np.testing.assert_array_equal(out[::2], b[0][::2])
    np.testing.assert_array_equal(lse[::2], b[1][::2])
    assert_equal_states((out[1::2], lse[1::2]), [x[1::2] for x in merge(*a, *b)])
    assert np.all(np.asarray(out[1::2]) != np.asarray(b[0][1::2]))


def test_two_empty_parts_are_empty():
    (empty, other), _ = states(0, 0)
    out, lse = merge(*empty, *other)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_order_and_grouping_change_nothing_but_the_rounding():
    parts, (out, lse) = states(5, 1, 40, 17, magnitude=3.0)
    for order in itertools.permutations(parts):
        merged, merged_lse = functools.reduce(lambda a, b: merge(*a, *b), order)
        np.testing.assert_allclose(merged, out, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)
    a, b, c, d = parts
    merged, _ = merge(*merge(*a, *b), *merge(*c, *d))
    np.testing.assert_allclose(merged, out, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_in_and_out_and_is_weighted_in_float32(dtype: str):
    (a, b), _ = states(30, 50, dtype=dtype)
    merged, _ = merge(*a, *b)
    assert merged.dtype == dtype
    wide, _ = merge(a[0].astype(jnp.float32), a[1], b[0].astype(jnp.float32), b[1])
    np.testing.assert_array_equal(merged, wide.astype(dtype))


def test_a_sink_in_one_part_counts_once():
    (a, b), _ = states(6, 6)
    sink = jnp.float32(0.7)
    with_sink = (
        a[0] * jnp.exp(a[1] - jnp.logaddexp(a[1], sink))[..., None],
        jnp.logaddexp(a[1], sink),
    )
    out, lse = merge(*with_sink, *b)
    whole, whole_lse = merge(*a, *b)
    share = np.exp(np.asarray(whole_lse) - np.asarray(lse))
    np.testing.assert_allclose(lse, np.logaddexp(whole_lse, 0.7), rtol=1e-6)
    np.testing.assert_allclose(out, whole * share[..., None], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(out_a=jnp.ones((T, H))), ValueError, r"out_a has shape \(5, 3\)"),
        (dict(out_b=jnp.ones((T, H, 4))), ValueError, r"out_b \(5, 3, 4\)"),
        (dict(out_b=jnp.ones((T, H, D), jnp.bfloat16)), TypeError, "out_b bfloat16"),
        (dict(lse_a=jnp.ones((H, T))), ValueError, r"lse_a has shape \(3, 5\); .* \(5, 3\)"),
        (dict(lse_b=jnp.ones((T, H), jnp.bfloat16)), TypeError, "lse_b has dtype bfloat16"),
    ],
)
def test_static_mistakes_are_refused_by_name(change: dict, error: type, message: str):
    out, lse = jnp.ones((T, H, D)), jnp.ones((T, H))
    arguments = dict(out_a=out, lse_a=lse, out_b=out, lse_b=lse)
    with pytest.raises(error, match=message):
        pkv.merge_attention_states(**{**arguments, **change})
