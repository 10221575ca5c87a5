"""A decoder in Flax Linen over a paged KV cache: `PagedAttention` stands in place of attention.

    python examples/flax_linen.py

Prompts are taken in by chunks of equal size, so that prompts of any length run the same program.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import paged_kv_jax as pkv
from paged_kv_jax.flax import rotary_embedding
from paged_kv_jax.flax.linen import PagedAttention

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN = 256, 64, 2, 4, 2, 128
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9]]
CONFIG = pkv.KVCacheConfig(
    num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=WIDTH // HEADS, num_blocks=64, block_size=8,
    max_seqs=len(PROMPTS), max_blocks_per_seq=16, dtype=jnp.float32,
)  # fmt: skip
CHUNK = 4  # prompt tokens of a row in one step


# --8<-- [start:model]
class Decoder(nn.Module):
    """Token ids in, logits out."""

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array, pool: pkv.KVPool, plan: pkv.Plan
    ) -> tuple[jax.Array, pkv.KVPool]:
        """tokens, positions int32 [T] -> logits [T, VOCAB], and the new pool."""
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        for layer in range(LAYERS):
            attention = PagedAttention(
                HEADS, num_kv_heads=KV_HEADS, use_bias=False,
                position_embedding=rotary_embedding, name=f"attention_{layer}",
            )  # fmt: skip
            h = nn.RMSNorm(name=f"attention_norm_{layer}")(x)
            y, pool = attention(h, positions, pool, plan, layer)
            x += y
            h = nn.RMSNorm(name=f"mlp_norm_{layer}")(x)
            gate = nn.Dense(HIDDEN, use_bias=False, name=f"gate_{layer}")(h)
            up = nn.Dense(HIDDEN, use_bias=False, name=f"up_{layer}")(h)
            x += nn.Dense(WIDTH, use_bias=False, name=f"down_{layer}")(nn.silu(gate) * up)
        h = nn.RMSNorm(name="norm")(x)
        return nn.Dense(VOCAB, use_bias=False, name="head")(h), pool


def step(params, tokens, positions, pool, plan):
    """The model as a function of its parameters."""
    return Decoder().apply({"params": params}, tokens, positions, pool, plan)


@functools.partial(jax.jit, static_argnames="config")
def init_params(key: jax.Array, config: pkv.KVCacheConfig):
    """Random weights; a cache of one token and its plan stand in for a step's."""
    one = jnp.zeros(1, int)
    cache, result = pkv.PagedKVCache.create(config).allocate(one, 1)
    cache, plan = cache.plan(one, 1, result)
    return Decoder().init(key, one, plan.positions, cache.pool, plan)["params"]


# --8<-- [end:model]


# --8<-- [start:loop]
@functools.partial(jax.jit, donate_argnames="cache")
def prefill_chunk(params, cache, seq_ids, tokens, counts, token):
    """The next counts [B] prompt tokens, packed in tokens [B * CHUNK].

    `token` [B] becomes what follows a row's prompt, once its last chunk is in.
    """
    cache, result = cache.allocate(seq_ids, counts, max_new_tokens=CHUNK)
    cache, plan = cache.plan(
        seq_ids, counts, result, num_tokens=tokens.shape[0], max_query_len=CHUNK
    )
    logits, pool = step(params, tokens, plan.positions, cache.pool, plan)
    chosen = jnp.argmax(logits[plan.last_tokens], axis=-1)
    return dataclasses.replace(cache, pool=pool), jnp.where(counts > 0, chosen, token)


@functools.partial(jax.jit, static_argnames="num_steps", donate_argnames="cache")
def decode(params, cache, seq_ids, token, num_steps):
    """`num_steps` greedy tokens after `token` [B], as [B, num_steps]."""

    def one(carry, _):
        cache, token = carry
        cache, plan, _ = cache.step(seq_ids, 1)
        logits, pool = step(params, token, plan.positions, cache.pool, plan)
        token = jnp.argmax(logits, axis=-1)
        return (dataclasses.replace(cache, pool=pool), token), token

    (cache, _), tokens = jax.lax.scan(one, (cache, token), length=num_steps)
    return cache, tokens.T


# --8<-- [end:loop]


def generate(
    params: dict, config: pkv.KVCacheConfig, prompts: list[list[int]], max_new_tokens: int
) -> np.ndarray:
    """Greedy continuations, [B, max_new_tokens]."""
    num_rows = len(prompts)
    cache, seq_ids = pkv.PagedKVCache.create(config), jnp.arange(num_rows)
    token = jnp.zeros(num_rows, int)
    for start in range(0, max(map(len, prompts)), CHUNK):
        pieces = [prompt[start : start + CHUNK] for prompt in prompts]
        counts = np.array([len(piece) for piece in pieces])
        packed = np.zeros(num_rows * CHUNK, int)
        packed[: counts.sum()] = [token for piece in pieces for token in piece]
        cache, token = prefill_chunk(params, cache, seq_ids, packed, counts, token)
    cache, rest = decode(params, cache, seq_ids, token, max_new_tokens - 1)
    pkv.raise_if_failed(cache)  # out of blocks, for one
    return np.concatenate([token[:, None], rest], axis=1)


def main() -> None:
    """Three prompts through a random model."""
    params = init_params(jax.random.key(0), CONFIG)
    print(generate(params, CONFIG, PROMPTS, max_new_tokens=24))


if __name__ == "__main__":
    main()
