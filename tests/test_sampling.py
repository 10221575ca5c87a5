"""Sampling: each option against what numpy says the distribution must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_kv_jax.sampling import Sampling, sample


def draws(logits, sampling, *, num=4000, seed=0):
    """`num` independent draws from one row of logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num, len(logits)))
    keys = jax.random.split(jax.random.key(seed), num)
    return np.asarray(sample(rows, keys, jnp.zeros(num, jnp.int32), sampling))


def assert_frequencies(tokens, probability):
    counts = np.bincount(tokens, minlength=len(probability)) / len(tokens)
    spread = np.sqrt(probability * (1 - probability) / len(tokens))
    np.testing.assert_array_less(np.abs(counts - probability), 5 * spread + 1e-12)


LOGITS = np.array([0.0, 2.0, -1.0, 1.5, 0.5])


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def test_temperature_zero_takes_the_most_likely_token():
    assert set(draws(LOGITS, Sampling(), num=8)) == {1}


def test_temperature_scales_the_distribution():
    assert_frequencies(draws(LOGITS, Sampling(temperature=0.7)), softmax(LOGITS / 0.7))


def test_top_k_keeps_the_k_most_likely():
    probability = softmax(np.where(LOGITS >= 1.5, LOGITS, -np.inf))
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, top_k=2)), probability)


def test_top_k_above_the_vocabulary_keeps_all():
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, top_k=99)), softmax(LOGITS))


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    # Probabilities, most likely first: 0.46, 0.28, 0.10, ...: 0.7 takes two tokens.
    probability = softmax(np.where(LOGITS >= 1.5, LOGITS, -np.inf))
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, top_p=0.7)), probability)


def test_top_p_never_drops_the_most_likely_token():
    assert set(draws(LOGITS, Sampling(temperature=1.0, top_p=1e-6), num=8)) == {1}


def test_a_row_draws_the_same_in_any_batch():
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    keys = jax.random.split(jax.random.key(2), 6)
    steps = jnp.arange(6, dtype=jnp.int32)
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9)
    together = sample(logits, keys, steps, sampling)
    for row in range(6):
        one = slice(row, row + 1)
        assert sample(logits[one], keys[one], steps[one], sampling)[0] == together[row]


def test_steps_of_one_row_draw_independently():
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (2000, 5))
    keys = jnp.broadcast_to(jax.random.key(3), (2000,))
    tokens = sample(logits, keys, jnp.arange(2000, dtype=jnp.int32), Sampling(temperature=1.0))
    assert_frequencies(np.asarray(tokens), softmax(LOGITS))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_values_that_cannot_work_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Sampling(**{field: value})
