"""SmolLM2 in float32 against transformers on the same file; golden/make_golden.py made the answers.

The model (93 MB) is fetched on first use.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv
from paged_kv_jax.models import load_model

pytestmark = pytest.mark.slow

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "smollm2.npz")
PROMPTS = ("question", "dialogue", "text")
SEQ_IDS = np.arange(len(PROMPTS), dtype=np.int32)


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2", jnp.float32)


@pytest.fixture(scope="module")
def prefilled(loaded):
    """(logits of each prompt [T, V], first new tokens [B], state, pool): the prompts as one batch."""
    config = loaded.config.kv_cache_config(
        num_blocks=32, max_seqs=3, max_blocks_per_seq=16, dtype=jnp.float32
    )
    prompts = [GOLDEN[f"{name}_tokens"] for name in PROMPTS]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    @jax.jit
    def prefill(model, tokens, state, pool):
        state, result = pkv.allocate(state, SEQ_IDS, lengths)
        plan = pkv.make_plan(state, SEQ_IDS, lengths, result, num_tokens=tokens.shape[0])
        hidden, pool = model(tokens, plan.positions, pool, plan)
        return model.logits(hidden), state, pool

    logits, state, pool = prefill(
        loaded.model, np.concatenate(prompts), pkv.init(config), pkv.init_pool(config)
    )
    split = np.split(np.asarray(logits), np.cumsum(lengths)[:-1])
    return split, np.array([rows[-1].argmax() for rows in split], np.int32), state, pool


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_equal_those_of_transformers(loaded, name):
    text, tokens = str(GOLDEN[f"{name}_text"]), GOLDEN[f"{name}_tokens"]
    assert loaded.tokenizer.encode(text) == tokens.tolist()
    assert loaded.tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_chat_prompt_equals_that_of_transformers(loaded):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert loaded.tokenizer.render_chat(messages) == str(GOLDEN["question_text"])
    assert loaded.tokenizer.encode_chat(messages) == GOLDEN["question_tokens"].tolist()


@pytest.mark.parametrize("row", range(3), ids=PROMPTS)
def test_logits_are_within_a_thousandth_of_transformers(prefilled, row):
    logits, name = prefilled[0][row], PROMPTS[row]
    top = np.take_along_axis(logits, GOLDEN[f"{name}_top_ids"], axis=1)
    strided = logits[:, :: int(GOLDEN["stride"])]
    np.testing.assert_allclose(logits[-1], GOLDEN[f"{name}_last_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(top, GOLDEN[f"{name}_top_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(strided, GOLDEN[f"{name}_strided_logits"], rtol=0, atol=1e-3)


def test_first_64_greedy_tokens_equal_those_of_transformers(loaded, prefilled):
    _, first, state, pool = prefilled

    @jax.jit
    def decode(model, tokens, state, pool):
        def step(carry, _):
            tokens, state, pool = carry
            state, result = pkv.append(state, SEQ_IDS, 1)
            plan = pkv.make_plan(state, SEQ_IDS, 1, result)
            hidden, pool = model(tokens, plan.positions, pool, plan)
            new = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
            return (new, state, pool), new

        (_, state, _), new = jax.lax.scan(step, (tokens, state, pool), length=63)
        return new, state

    new, state = decode(loaded.model, first, state, pool)
    pkv.raise_if_failed(state)
    greedy = np.concatenate([first[None], new]).T
    for row, name in enumerate(PROMPTS):
        np.testing.assert_array_equal(greedy[row], GOLDEN[f"{name}_greedy"], err_msg=name)
