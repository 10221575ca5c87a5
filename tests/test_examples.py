"""The examples run as they stand, and choose the tokens that full dense forward passes choose."""

import re

import flax_linen
import flax_nnx
import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
import pytest
import speculative_decoding
from flax import nnx

pytestmark = pytest.mark.slow

NEW_TOKENS = 24  # as in the examples' `main`, so that nothing compiles twice


def dense_logits(weights: dict, tokens: list[int]) -> np.ndarray:
    """float64 logits [S, V] of one sequence: all three models, from plain arrays.

    weights: embed [V, E], head [E, V], and `layers`, a list of dicts: q [E, H, D], k and v [E, K, D],
    out [H, D, E], gate and up [E, F], down [F, E].
    """
    x = np.asarray(weights["embed"], np.float64)[tokens]
    positions = np.arange(len(tokens))

    def norm(x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def rotate(x):
        half = x.shape[-1] // 2
        turn = np.exp(1j * positions[:, None, None] * 10000.0 ** (-np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    for layer in weights["layers"]:
        w = {name: np.asarray(array, np.float64) for name, array in layer.items()}
        q, k, v = (np.einsum("se,ehd->shd", norm(x), w[name]) for name in "qkv")
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) * q.shape[-1] ** -0.5
        scores = np.where(positions[:, None] >= positions, scores, -np.inf)
        probability = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probability /= probability.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", probability, v)
        x = x + np.einsum("qhd,hde->qe", out, w["out"])
        gate = norm(x) @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (norm(x) @ w["up"])) @ w["down"]
    return norm(x) @ np.asarray(weights["head"], np.float64)


def assert_greedy(weights: dict, prompts, texts) -> None:
    """Each token of each text is the one that the dense model finds likeliest after all before it."""
    assert (
        len({token for text in texts for token in text}) > 15
    )  # no model that always says one word
    for prompt, text in zip(prompts, texts, strict=True):
        logits = dense_logits(weights, [*prompt, *text])[len(prompt) - 1 : -1]
        assert list(text) == np.argmax(logits, axis=-1).tolist()


def plain_weights(params: dict) -> dict:
    layers = [
        {name: stacked[layer] for name, stacked in params["layers"].items()}
        for layer in range(plain_jax.LAYERS)
    ]
    return dict(embed=params["embed"], head=params["head"], layers=layers)


@pytest.fixture(scope="module")
def params():
    return plain_jax.init_params(jax.random.key(0))


def test_plain_jax(params, capsys):
    plain_jax.main()
    texts = plain_jax.generate(params, plain_jax.PROMPTS, NEW_TOKENS)
    assert capsys.readouterr().out == f"{texts}\n"
    assert_greedy(plain_weights(params), plain_jax.PROMPTS, texts.tolist())


def test_flax_nnx(capsys):
    flax_nnx.main()
    printed = [eval(line) for line in capsys.readouterr().out.splitlines()]
    texts, stopped = printed[:3], printed[3:]
    model = flax_nnx.Decoder(nnx.Rngs(0))
    layers = [
        dict(
            q=layer.attention.query.kernel, k=layer.attention.key.kernel,
            v=layer.attention.value.kernel, out=layer.attention.out.kernel,
            gate=layer.gate.kernel, up=layer.up.kernel, down=layer.down.kernel,
        )
        for layer in model.layers
    ]  # fmt: skip
    weights = dict(embed=model.embed.embedding, head=model.head.kernel, layers=layers)
    assert [len(text) for text in texts] == [NEW_TOKENS] * 3
    assert_greedy(weights, flax_nnx.PROMPTS, texts)
    # The stop token cuts each text after its first occurrence.
    stop = texts[0][3]
    cut = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    assert stopped == cut
    assert stopped != texts


def test_flax_linen(capsys):
    flax_linen.main()
    printed = capsys.readouterr().out
    texts = np.fromstring(printed.replace("[", " ").replace("]", " "), int, sep=" ")
    texts = texts.reshape(3, NEW_TOKENS).tolist()
    params = flax_linen.init_params(jax.random.key(0), flax_linen.CONFIG)
    layers = []
    for layer in range(flax_linen.LAYERS):
        attention = params[f"attention_{layer}"]
        weights = {name: params[f"{name}_{layer}"]["kernel"] for name in ("gate", "up", "down")}
        weights |= {name[0]: attention[name]["kernel"] for name in ("query", "key", "value")}
        layers.append(weights | {"out": attention["out"]["kernel"]})
    weights = dict(embed=params["embed"]["embedding"], head=params["head"]["kernel"], layers=layers)
    assert_greedy(weights, flax_linen.PROMPTS, texts)


def test_speculative_decoding_gives_the_same_text_in_fewer_steps(params, capsys):
    speculative_decoding.main()
    assert re.fullmatch(
        r"63 steps without drafts, \d+ with; same text: True\n", capsys.readouterr().out
    )
    other_params = plain_jax.init_params(jax.random.key(1))  # whose texts change course more often
    for weights, most_steps in ((params, 40), (other_params, 55)):
        texts, steps = speculative_decoding.generate(weights, plain_jax.PROMPTS, 64, num_drafts=4)
        assert texts == plain_jax.generate(weights, plain_jax.PROMPTS, 64).tolist()
        assert steps < most_steps
        assert_greedy(plain_weights(weights), plain_jax.PROMPTS, texts)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([5, 1, 2, 3, 4, 1, 2], [3, 4, 1]),  # what followed 1, 2
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the last time
        ([6, 7, 7, 7], [7, 7, 7]),  # the text ends: it goes on with its period
        ([1, 2, 1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3, 4], [-1, -1, -1]),  # 3, 4 never came before
        ([3, 4], [-1, -1, -1]),
    ],
)
def test_drafts_are_what_followed_the_last_two_tokens_before(text, drafts):
    padded = jnp.asarray(text + [2] * (10 - len(text)))  # what is past the text is not looked at
    found = jax.jit(speculative_decoding.draft, static_argnums=2)(padded, len(text), 3)
    assert found.tolist() == drafts
