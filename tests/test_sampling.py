"""Sampling: each option against what numpy says the distribution must be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_kv_jax.sampling import Sampling, SamplingRows, _cut, penalise_repetition, sample

jitted_sample = jax.jit(sample)


def draws(logits, sampling, *, num=4000, seed=0):
    """`num` independent draws from one row of logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num, len(logits)))
    keys = jax.random.split(jax.random.key(seed), num)
    options = SamplingRows.of(sampling, num)
    return np.asarray(jitted_sample(rows, keys, jnp.zeros(num, jnp.int32), options))


def assert_frequencies(tokens, probability):
    counts = np.bincount(tokens, minlength=len(probability)) / len(tokens)
    spread = np.sqrt(probability * (1 - probability) / len(tokens))
    np.testing.assert_array_less(np.abs(counts - probability), 5 * spread + 1e-12)


LOGITS = np.array([0.0, 2.0, -1.0, 1.5, 0.5])


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def test_temperature_zero_takes_the_most_likely_token():
    assert set(draws(LOGITS, Sampling())) == {1}


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
    assert set(draws(LOGITS, Sampling(temperature=1.0, top_p=1e-6))) == {1}


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely():
    # e^-0.5 = 0.61 and e^-1.5 = 0.22 times as likely as the most likely, then less.
    probability = softmax(np.where(LOGITS >= 1.5, LOGITS, -np.inf))
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, min_p=0.5)), probability)
    probability = softmax(np.where(LOGITS >= 0.5, LOGITS, -np.inf))
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, min_p=0.2)), probability)
    assert set(draws(LOGITS, Sampling(temperature=1.0, min_p=1.0))) == {1}


def test_top_p_counts_what_top_k_left():
    # Of the three that top-k keeps, 0.55, 0.33 and 0.12 likely, top-p keeps the first two.
    probability = softmax(np.where(LOGITS >= 1.5, LOGITS, -np.inf))
    assert_frequencies(draws(LOGITS, Sampling(temperature=1.0, top_k=3, top_p=0.8)), probability)


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
    logits = np.array([1.0, 1.0, -0.0, 0.0, 1.0])
    expected = softmax(np.where(logits == 1, logits, -np.inf))
    assert_frequencies(draws(logits, Sampling(temperature=1.0, top_k=2)), expected)
    assert_frequencies(draws(logits, Sampling(temperature=1.0, top_p=0.1)), expected)


def test_beside_rows_that_cut_a_row_without_a_cut_keeps_what_changes_no_sum():
    logits = jnp.array([[0.0, -30.0], [0.0, -30.0]])  # 1 + 1e-13 is 1 in float32
    rows = SamplingRows.of(Sampling(temperature=1.0), 2)
    rows = dataclasses.replace(rows, top_p=jnp.array([1.0, 0.7]))
    np.testing.assert_array_equal(_cut(logits, rows), [[0.0, -30.0], [0.0, -np.inf]])


def test_each_row_has_options_of_its_own():
    num = 6000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (num, 5))
    kind = np.arange(num) % 3
    pick = functools.partial(np.choose, kind)
    rows = SamplingRows(
        temperature=jnp.asarray(pick([0.0, 0.7, 1.0]), jnp.float32),
        top_k=jnp.asarray(pick([0, 0, 2]), jnp.int32),
        top_p=jnp.ones(num),
        min_p=jnp.zeros(num),
        repetition_penalty=jnp.ones(num),
    )
    tokens = np.asarray(
        sample(logits, jax.random.split(jax.random.key(5), num), jnp.zeros(num, jnp.int32), rows)
    )
    assert set(tokens[kind == 0]) == {1}
    assert_frequencies(tokens[kind == 1], softmax(LOGITS / 0.7))
    assert_frequencies(tokens[kind == 2], softmax(np.where(LOGITS >= 1.5, LOGITS, -np.inf)))


def test_the_penalty_makes_a_rows_own_tokens_less_likely():
    logits = np.array([[3.0, -1.0, 2.0, 0.5], [3.0, -1.0, 2.0, 0.5], [3.0, -1.0, 2.0, 0.5]])
    tokens = np.array([[0, 1, 0, 2], [0, 1, 3, 3], [3, -1, 99, 0]], np.int32)
    lens, penalty = np.array([3, 4, 3], np.int32), np.array([2.0, 1.0, 4.0], np.float32)
    expected = [[1.5, -2.0, 2.0, 0.5], [3.0, -1.0, 2.0, 0.5], [3.0, -1.0, 2.0, 0.125]]
    found = penalise_repetition(jnp.asarray(logits, jnp.float32), penalty, tokens, lens)
    np.testing.assert_array_equal(found, np.float32(expected))


def test_a_row_draws_the_same_in_any_batch():
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    keys = jax.random.split(jax.random.key(2), 6)
    steps = jnp.arange(6, dtype=jnp.int32)
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9)
    together = jitted_sample(logits, keys, steps, SamplingRows.of(sampling, 6))
    for row in range(6):
        one = slice(row, row + 1)
        alone = jitted_sample(logits[one], keys[one], steps[one], SamplingRows.of(sampling, 1))
        assert alone[0] == together[row]


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
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_values_that_cannot_work_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Sampling(**{field: value})
