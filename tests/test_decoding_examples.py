"""Parallel sampling and beam search over forks, as one compiled loop each, against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_pool import ids

import paged_kv_jax as pkv

pytestmark = pytest.mark.slow

VOCAB, HEADS, DIM = 13, 2, 8
CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=HEADS, head_dim=DIM, num_blocks=40, block_size=4, max_seqs=8,
    max_blocks_per_seq=6, dtype="float32",
)  # fmt: skip
PROMPT = np.array([3, 1, 4, 1, 5, 9], np.int32)
_rng = np.random.default_rng(5)
EMBED = _rng.standard_normal((VOCAB, HEADS, DIM)).astype(np.float32)
UNEMBED = _rng.standard_normal((HEADS * DIM, VOCAB)).astype(np.float32)


def logits_after(tokens) -> np.ndarray:
    """A one-layer attention model over a whole history, in float64: log-probabilities [VOCAB]."""
    kv = EMBED[np.asarray(tokens)].astype(np.float64)
    scores = np.einsum("hd,shd->hs", kv[-1], kv) * DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    logits = np.einsum("hs,shd->hd", weights, kv).reshape(-1) @ UNEMBED.astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def forward(state, pool, seq_ids, tokens, count, result, **sizes):
    """The same model over the paged cache: log-probabilities after each row's last token."""
    plan = pkv.make_plan(state, seq_ids, count, result, **sizes)
    kv = jnp.asarray(EMBED)[tokens]
    pool = pkv.write(pool, 0, kv, kv, plan)
    out = pkv.paged_attention(kv, pool, 0, plan)[plan.last_tokens]
    return pool, jax.nn.log_softmax(out.reshape(out.shape[0], -1) @ jnp.asarray(UNEMBED))


def prefill():
    state, pool = pkv.init(CONFIG), pkv.init_pool(CONFIG)
    count = ids(len(PROMPT))
    state, result = pkv.allocate(state, ids(0), count)
    pool, logits = forward(
        state, pool, ids(0), jnp.asarray(PROMPT), count, result, num_tokens=len(PROMPT)
    )
    return state, pool, logits[0]


def test_parallel_samples_of_one_prompt_share_it_and_diverge():
    """Sample i always takes the token ranked i-th: distinct texts, known in advance."""
    num_samples, steps = 5, 9

    @jax.jit
    def sample():
        state, pool, logits = prefill()
        samples = jnp.arange(1, num_samples + 1, dtype=jnp.int32)
        state, _, copies = pkv.fork(state, jnp.zeros_like(samples), samples)
        pool = pkv.copy_blocks(pool, copies.src, copies.dst)
        state, _ = pkv.free(state, ids(0))
        used = CONFIG.num_blocks - state.free_top

        def step(carry, _):
            state, pool, logits = carry
            ranked = jnp.argsort(-logits, axis=-1).astype(jnp.int32)
            tokens = ranked[jnp.arange(num_samples), samples - 1]
            state, result = pkv.append(state, samples, 1)
            pool, logits = forward(state, pool, samples, tokens, 1, result)
            return (state, pool, logits), tokens

        logits = jnp.broadcast_to(logits, (num_samples, VOCAB))
        (state, *_), tokens = jax.lax.scan(step, (state, pool, logits), length=steps)
        return state, tokens.T, used

    state, tokens, used = sample()
    assert int(used) == 1 + num_samples  # the prompt's full block once, and each sample's own tail
    assert pkv.check_invariants(state) == []
    pkv.raise_if_failed(state)
    for rank, sampled in enumerate(np.asarray(tokens)):
        history = list(PROMPT)
        for token in sampled:
            assert token == np.argsort(-logits_after(history))[rank]
            history.append(int(token))


def test_beam_search_re_parents_its_beams_every_step():
    """Survivors are forked into the other set of ids, and the set they came from is freed."""
    width, steps = 3, 10

    @jax.jit
    def search():
        state, pool, logits = prefill()
        score, first = jax.lax.top_k(logits, width)
        beams, spare = jnp.arange(1, 1 + width), jnp.arange(1 + width, 1 + 2 * width)
        state, _, copies = pkv.fork(state, jnp.zeros(width, jnp.int32), beams)
        pool = pkv.copy_blocks(pool, copies.src, copies.dst)
        state, _ = pkv.free(state, ids(0))

        def step(carry, _):
            state, pool, beams, spare, score, tokens = carry
            state, result = pkv.append(state, beams, 1)
            pool, logits = forward(state, pool, beams, tokens, 1, result)
            score, best = jax.lax.top_k((score[:, None] + logits).reshape(-1), width)
            parent, tokens = best // VOCAB, (best % VOCAB).astype(jnp.int32)
            state, _, copies = pkv.fork(state, beams[parent], spare)
            pool = pkv.copy_blocks(pool, copies.src, copies.dst)
            state, _ = pkv.free(state, beams)
            return (state, pool, spare, beams, score, tokens), (parent, tokens)

        carry = (state, pool, beams, spare, score, first.astype(jnp.int32))
        (state, *_), (parents, tokens) = jax.lax.scan(step, carry, length=steps)
        return state, first, parents, tokens

    state, first, parents, tokens = search()
    assert pkv.check_invariants(state) == []
    pkv.raise_if_failed(state)

    # The same search over whole histories.
    start = logits_after(list(PROMPT))
    best = np.argsort(-start)[:width]
    histories, scores = [[*PROMPT, int(token)] for token in best], start[best]
    assert np.asarray(first).tolist() == best.tolist()
    for step in range(steps):
        options = np.stack([logits_after(history) for history in histories]) + scores[:, None]
        best = np.argsort(-options.reshape(-1))[:width]
        assert np.asarray(parents)[step].tolist() == (best // VOCAB).tolist(), f"step {step}"
        assert np.asarray(tokens)[step].tolist() == (best % VOCAB).tolist(), f"step {step}"
        scores = options.reshape(-1)[best]
        histories = [[*histories[i // VOCAB], int(i % VOCAB)] for i in best]
    assert len({tuple(np.asarray(parents)[step]) for step in range(steps)}) > 1, (
        "nothing to re-parent"
    )
