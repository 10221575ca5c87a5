"""Speculative decoding by prompt lookup: same greedy text, fewer steps of the model.

    python examples/speculative_decoding.py

Each step drafts a few tokens for every sequence, lets the model judge all of them at once, keeps the
drafts that the model would have chosen itself, and truncates the rest. The drafts cost nothing: they
are what followed the last two tokens the last time these occurred in the text (Saxena, "Prompt Lookup
Decoding", 2023). Drafting and verifying: Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023. The model is that of plain_jax.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
from plain_jax import HEAD_DIM, KV_HEADS, LAYERS, PROMPTS, step

import paged_kv_jax as pkv


# --8<-- [start:draft]
def draft(text: jax.Array, length: jax.Array, num_drafts: int) -> jax.Array:
    """What followed the last two tokens of text[:length] the last time they occurred.

    Args:
      text: int32 [C].
      length: int32 [], at least 2.
      num_drafts: drafts wanted.

    Returns:
      int32 [num_drafts]; -1, which no model chooses, where there is nothing to draft.
    """
    start = jnp.arange(text.shape[0])
    follows = jnp.roll(text, -1)
    is_match = (text == text[length - 2]) & (follows == text[length - 1]) & (start < length - 2)
    last = jnp.max(jnp.where(is_match, start, -1))
    period = length - 2 - last  # the text is taken to go on as it did, over and over
    source = last + 2 + jnp.arange(num_drafts) % period
    return jnp.where(last >= 0, text[source], -1)


# --8<-- [end:draft]


# --8<-- [start:loop]
@functools.partial(jax.jit, static_argnames="num_drafts", donate_argnames="cache")
def decode(params, cache, text, lengths, limits, num_drafts):
    """Lengthen every text to its limit.

    Args:
      params: of the model.
      cache: holds all tokens of each text but its last one; sequence b is row b.
      text: int32 [B, C], with room for `limits` tokens.
      lengths: int32 [B], tokens of each text, at least 2.
      limits: int32 [B], lengths to reach.
      num_drafts: tokens drafted for each sequence and step.

    Returns:
      The cache, the texts, and the number of steps.
    """
    num_rows = text.shape[0]
    rows = jnp.arange(num_rows)
    q_len = 1 + num_drafts

    def one(carry):
        cache, text, lengths, steps = carry
        live_ids = jnp.where(lengths < limits, rows, -1)
        drafts = jax.vmap(draft, in_axes=(0, 0, None))(text, lengths, num_drafts)
        tokens = jnp.concatenate([text[rows, lengths - 1][:, None], drafts], axis=1)  # [B, q_len]

        # One step of the model for all of them; -1 is no token, so the model sees 0 in its place.
        cache, plan, _ = cache.step(live_ids, q_len)
        logits, pool = step(
            params, jnp.maximum(tokens, 0).reshape(-1), plan.positions, cache.pool, plan
        )
        cache = dataclasses.replace(cache, pool=pool)
        chosen = jnp.argmax(logits, axis=-1).reshape(num_rows, q_len)  # after each token

        # A draft stands if it is what the model chose, and so does every draft before it.
        is_right = (drafts == chosen[:, :-1]).astype(jnp.int32)
        accepted = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1)
        # The model's own choice after them is new too.
        num_new = jnp.minimum(accepted + 1, limits - lengths)
        offsets = jnp.arange(q_len)
        column = jnp.where(offsets < num_new[:, None], lengths[:, None] + offsets, text.shape[1])
        text = text.at[rows[:, None], column].set(chosen, mode="drop")
        lengths += jnp.where(live_ids >= 0, num_new, 0)

        # The cache holds what the text holds, but for the last token: the rest was rejected.
        cache, _ = cache.truncate(live_ids, lengths - 1)
        return cache, text, lengths, steps + 1

    def goes_on(carry):
        _, _, lengths, _ = carry
        return jnp.any(lengths < limits)

    cache, text, _, steps = jax.lax.while_loop(goes_on, one, (cache, text, lengths, jnp.int32(0)))
    return cache, text, steps


# --8<-- [end:loop]


@functools.partial(jax.jit, donate_argnames="cache")
def prefill(params, cache, tokens, lengths):
    """Take prompts in, packed one after another in tokens [T]."""
    rows = jnp.arange(lengths.shape[0])
    cache, result = cache.allocate(rows, lengths)
    cache, plan = cache.plan(rows, lengths, result, num_tokens=tokens.shape[0])
    logits, pool = step(params, tokens, plan.positions, cache.pool, plan)
    cache = dataclasses.replace(cache, pool=pool)
    return cache, jnp.argmax(logits[plan.last_tokens], axis=-1)


def generate(
    params: dict, prompts: list[list[int]], max_new_tokens: int, num_drafts: int
) -> tuple[list[list[int]], int]:
    """Greedy continuations, and the number of decode steps that they took."""
    lengths = np.array([len(prompt) for prompt in prompts])
    limits = lengths + max_new_tokens
    # A step writes up to num_drafts tokens more than it keeps.
    config = pkv.KVCacheConfig(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_blocks=64, block_size=8,
        max_seqs=len(prompts), max_blocks_per_seq=-(-(limits.max() + num_drafts) // 8),
        dtype=jnp.float32,
    )  # fmt: skip
    cache = pkv.PagedKVCache.create(config)
    cache, first = prefill(params, cache, np.concatenate(prompts), lengths)
    text = np.zeros((len(prompts), limits.max()), int)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
        text[row, len(prompt)] = first[row]
    cache, text, steps = decode(params, cache, text, lengths + 1, limits, num_drafts)
    pkv.raise_if_failed(cache)
    rows = np.asarray(text)
    return [
        rows[b, start:end].tolist()
        for b, (start, end) in enumerate(zip(lengths, limits, strict=True))
    ], int(steps)


def main() -> None:
    """The same prompts with and without drafts."""
    params = plain_jax.init_params(jax.random.key(0))
    plain = plain_jax.generate(params, PROMPTS, max_new_tokens=64)
    texts, steps = generate(params, PROMPTS, max_new_tokens=64, num_drafts=4)
    print(f"63 steps without drafts, {steps} with; same text: {texts == plain.tolist()}")


if __name__ == "__main__":
    main()
