"""The model over the paged cache: against transformers' logits, and against a contiguous cache."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paged_kv_jax as pkv
from paged_kv_jax.models import load_model
from paged_kv_jax.models.contiguous import contiguous_forward, init_cache
from paged_kv_jax.models.huggingface import load_model_folder
from paged_kv_jax.models.llama import (
    Embedding,
    Linear,
    Llama,
    LlamaConfig,
    apply_rotary,
    rotary_angles,
)

TINY = pathlib.Path(__file__).parent / "golden" / "tiny"
VARIANTS = ("llama", "llama3", "qwen2", "qwen3", "mistral")
SEQ_IDS = np.array([2, 0, 3], np.int32)  # not in the order of the rows
PREFILL = np.array([11, 7, 3], np.int32)
SCHEDULES = {  # tokens each row brings in each step of the prefill
    "whole": [[11, 7, 3]],
    "chunked": [[4, 0, 3], [4, 5, 0], [3, 2, 0]],
}
PACKED_TOKENS = (
    24  # T of every packed step: larger than any schedule needs, so padding is there too
)
TINY_CONFIG = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64,
)  # fmt: skip


def golden(name):
    arrays = np.load(TINY / name / "golden.npz")
    return arrays["tokens"], arrays["logits"]


def full_forward(model, tokens):
    """float32 logits [B, Q, V] of tokens [B, Q], each row from position 0, without any paging."""
    batch, length = tokens.shape
    cache = init_cache(model.config, batch, length)
    hidden, _ = contiguous_forward(model, tokens, jnp.zeros(batch, jnp.int32), cache)
    return model.logits(hidden)


@jax.jit
def packed_step(model, tokens, q_lens, state, pool):
    """Rows bring q_lens tokens of tokens [T]; logits [B, V] of each row's last token."""
    state, result = pkv.allocate(state, SEQ_IDS, q_lens)
    plan = pkv.make_plan(state, SEQ_IDS, q_lens, result, num_tokens=tokens.shape[0])
    hidden, pool = model(tokens, plan.positions, pool, plan)
    return model.logits(hidden[plan.last_tokens]), state, pool


@jax.jit
def decode_step(model, tokens, state, pool):
    """Every row brings one token; logits [B, V]."""
    state, result = pkv.append(state, SEQ_IDS, 1)
    plan = pkv.make_plan(state, SEQ_IDS, 1, result)
    hidden, pool = model(tokens, plan.positions, pool, plan)
    return model.logits(hidden), state, pool


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name):
    tokens, expected = golden(name)
    model = load_model_folder(TINY / name, jnp.float32)
    logits = jax.jit(full_forward)(model, jnp.asarray(tokens)[None])[0]
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        # Every block size with and without a window; biases and q/k norms come before the cache.
        *(("mistral", block_size) for block_size in (1, 8, 16, 64)),
        ("llama", 1),
        ("qwen2", 8),
        ("qwen3", 16),
        ("llama", 64),
    ],
)
def test_paged_prefill_and_decode_equal_a_full_forward(name, block_size):
    model = load_model_folder(TINY / name, jnp.float32)
    rng = np.random.default_rng(block_size)
    length = int(PREFILL.max()) + 6
    tokens = rng.integers(0, model.config.vocab_size, (3, length)).astype(np.int32)
    expected = np.asarray(jax.jit(full_forward)(model, tokens))
    tolerance = dict(atol=2e-5 * np.abs(expected).max(), rtol=0)
    config = model.config.kv_cache_config(
        num_blocks=3 * -(-length // block_size) + 2, block_size=block_size, max_seqs=4,
        max_blocks_per_seq=-(-length // block_size), dtype=jnp.float32,
    )  # fmt: skip
    for schedule in SCHEDULES.values():
        state, pool = pkv.init(config), pkv.init_pool(config)
        pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)  # nothing unwritten is read
        done = np.zeros(3, np.int32)
        for q_lens in np.array(schedule, np.int32):
            packed = np.full(PACKED_TOKENS, -1, np.int32)
            rows = [tokens[b, done[b] : done[b] + q_lens[b]] for b in range(3)]
            packed[: q_lens.sum()] = np.concatenate(rows)
            logits, state, pool = packed_step(model, packed, q_lens, state, pool)
            done += q_lens
            for b in np.flatnonzero(q_lens):
                np.testing.assert_allclose(logits[b], expected[b, done[b] - 1], **tolerance)
        np.testing.assert_array_equal(done, PREFILL)
        for _ in range(6):
            new = tokens[np.arange(3), done]
            logits, state, pool = decode_step(model, new, state, pool)
            np.testing.assert_allclose(logits, expected[np.arange(3), done], **tolerance)
            done += 1
        pkv.raise_if_failed(state)


def test_contiguous_decode_equals_a_full_forward():
    tokens, expected = golden("mistral")
    model = load_model_folder(TINY / "mistral", jnp.float32)
    cache = init_cache(model.config, 1, len(tokens))
    step = jax.jit(contiguous_forward)
    hidden, cache = step(model, tokens[None, :20], jnp.array([0]), cache)
    logits = [model.logits(hidden[0, -1])]
    for position in range(20, 24):
        hidden, cache = step(model, tokens[None, [position]], jnp.array([position]), cache)
        logits.append(model.logits(hidden[0, -1]))
    np.testing.assert_allclose(logits, expected[19:], atol=2e-5 * np.abs(expected).max())


def test_bfloat16_weights_give_bfloat16_hidden_states_and_float32_logits():
    tokens, expected = golden("llama")
    model = load_model_folder(TINY / "llama", jnp.bfloat16)
    cache = init_cache(model.config, 1, len(tokens))
    hidden, _ = jax.jit(contiguous_forward)(model, tokens[None], jnp.array([0]), cache)
    logits = model.logits(hidden[0])
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).mean() < 0.02 * np.abs(expected).max()


def test_sums_are_accumulated_in_float32():
    layer = Linear(4097, 1, bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.weight[...] = jnp.ones((1, 4097), jnp.bfloat16)
    # 4097 ones: a bfloat16 accumulator stops at 256; the rounded result is 4096.
    assert float(layer(jnp.ones(4097, jnp.bfloat16))[0]) == 4096

    config = LlamaConfig(**TINY_CONFIG | dict(hidden_size=4097, num_layers=1, tie_embeddings=True))
    model = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.embed_tokens.weight[...] = jnp.ones((32, 4097), jnp.bfloat16)
    assert float(model.logits(jnp.ones(4097, jnp.bfloat16))[0]) == 4097  # not even rounded


def test_rotary_turns_each_pair_by_position_times_frequency():
    config = LlamaConfig(**TINY_CONFIG | dict(rope_theta=100.0, rope_factors=(1.0, 2.0, 4.0, 8.0)))
    x = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)
    turned = apply_rotary(jnp.asarray(x), *rotary_angles(config, jnp.array([0, 7])))
    np.testing.assert_array_equal(turned[0], x[0])
    for i, factor in enumerate(config.rope_factors):
        angle = 7 * 100.0 ** (-2 * i / 8) / factor
        expected = complex(*x[1, 0, [i, i + 4]]) * np.exp(1j * angle)
        np.testing.assert_allclose(
            turned[1, 0, [i, i + 4]], [expected.real, expected.imag], atol=1e-6
        )


def test_token_outside_the_vocabulary_gives_nan_not_a_neighbours_embedding():
    embedding = Embedding(32, 16, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rows = embedding(jnp.array([0, 31, 32, -1]))
    np.testing.assert_array_equal(jnp.isnan(rows).all(axis=-1), [False, False, True, True])


def test_kv_cache_config_takes_its_geometry_from_the_model():
    config = LlamaConfig(**TINY_CONFIG).kv_cache_config(
        num_blocks=10, block_size=4, max_seqs=3, max_blocks_per_seq=5, dtype=jnp.float16
    )
    assert config == pkv.KVCacheConfig(
        num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=10, block_size=4, max_seqs=3,
        max_blocks_per_seq=5, dtype=jnp.float16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers=0 must be an int of at least 1"),
        ("vocab_size", 2.0, r"vocab_size=2.0 must be an int"),
        ("num_heads", 3, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ("head_dim", 7, "head_dim=7 must be even"),
        ("rope_theta", -1.0, r"rope_theta=-1.0 must be a positive number"),
        ("rope_factors", (1.0,), "rope_factors has 1 entries; head_dim=8 takes 4"),
        ("rope_factors", (1.0, 1.0, 0.0, 1.0), "must be positive"),
        ("sliding_window", 0, "sliding_window=0 must be None or at least 1"),
        ("qk_norm", 1, "qk_norm=1 must be True or False"),
    ],
)
def test_config_refuses_what_cannot_work(field, value, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**TINY_CONFIG | {field: value})


def test_load_model_names_what_it_takes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be smollm2, a \.gguf file or a folder"):
        load_model(tmp_path / "nothing")
