"""A decoder in Flax NNX over a paged KV cache: `PagedAttention` stands in place of attention.

    python examples/flax_nnx.py

Sequences end at a stop token and give their blocks back inside the compiled loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import paged_kv_jax as pkv
from paged_kv_jax.flax import rotary_embedding
from paged_kv_jax.flax.nnx import PagedAttention

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN = 256, 64, 2, 4, 2, 128
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9]]


# --8<-- [start:model]
class Layer(nnx.Module):
    """A pre-norm decoder layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = PagedAttention(
            HEADS, WIDTH, num_kv_heads=KV_HEADS, use_bias=False,
            position_embedding=rotary_embedding, rngs=rngs,
        )  # fmt: skip
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x, positions, pool, plan, layer):
        """x [T, WIDTH] -> x, and the pool with this layer's keys and values."""
        y, pool = self.attention(self.attention_norm(x), positions, pool, plan, layer)
        x += y
        h = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h)), pool


class Decoder(nnx.Module):
    """Token ids in, logits out."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, pool: pkv.KVPool, plan: pkv.Plan
    ) -> tuple[jax.Array, pkv.KVPool]:
        """tokens, positions int32 [T] -> logits [T, VOCAB], and the new pool."""
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x, pool = layer(x, positions, pool, plan, index)
        return self.head(self.norm(x)), pool


# --8<-- [end:model]


# --8<-- [start:loop]
@nnx.jit(static_argnames=("config", "max_new_tokens"))
def decode(model, tokens, lengths, stop_token, *, config, max_new_tokens):
    """Prefill and the whole decode loop, as one program.

    tokens int32 [T], the prompts one after another; lengths int32 [B]. The new tokens of each,
    int32 [B, max_new_tokens], -1 after a stop token; and the cache.
    """
    num_rows = lengths.shape[0]
    seq_ids = jnp.arange(num_rows)
    cache, result = pkv.PagedKVCache.create(config).allocate(seq_ids, lengths)
    cache, plan = cache.plan(seq_ids, lengths, result, num_tokens=tokens.shape[0])
    logits, pool = model(tokens, plan.positions, cache.pool, plan)
    cache = dataclasses.replace(cache, pool=pool)
    token = jnp.argmax(logits[plan.last_tokens], axis=-1)

    def step(carry):
        cache, live_ids, token, outputs, count = carry
        outputs = outputs.at[:, count].set(jnp.where(live_ids >= 0, token, -1))
        is_done = (token == stop_token) | (count + 1 == max_new_tokens)
        cache, _ = cache.free(jnp.where(is_done, live_ids, -1))  # -1: a row that does nothing
        live_ids = jnp.where(is_done, -1, live_ids)

        cache, plan, _ = cache.step(live_ids, 1)
        logits, pool = model(token, plan.positions, cache.pool, plan)
        cache = dataclasses.replace(cache, pool=pool)
        return cache, live_ids, jnp.argmax(logits, axis=-1), outputs, count + 1

    def goes_on(carry):
        _, live_ids, _, _, count = carry
        return (count < max_new_tokens) & jnp.any(live_ids >= 0)

    outputs = jnp.full((num_rows, max_new_tokens), -1)
    carry = cache, seq_ids, token, outputs, jnp.int32(0)
    cache, _, _, outputs, _ = jax.lax.while_loop(goes_on, step, carry)
    return outputs, cache


# --8<-- [end:loop]


def generate(
    model: Decoder, prompts: list[list[int]], max_new_tokens: int, stop_token: int = -1
) -> list[list[int]]:
    """Greedy continuations, up to and with a stop token."""
    config = pkv.KVCacheConfig(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=WIDTH // HEADS, num_blocks=64,
        block_size=8, max_seqs=len(prompts), max_blocks_per_seq=16, dtype=jnp.float32,
    )  # fmt: skip
    tokens = jnp.asarray(np.concatenate(prompts))
    lengths = jnp.asarray([len(prompt) for prompt in prompts])
    outputs, cache = decode(
        model, tokens, lengths, stop_token, config=config, max_new_tokens=max_new_tokens
    )
    pkv.raise_if_failed(cache)  # out of blocks, for one
    return [[token for token in row if token >= 0] for row in outputs.tolist()]


def main() -> None:
    """Three prompts through a random model; then again, to the first one's fourth token."""
    model = Decoder(nnx.Rngs(0))
    texts = generate(model, PROMPTS, max_new_tokens=24)
    print(*texts, sep="\n")
    print(*generate(model, PROMPTS, max_new_tokens=24, stop_token=texts[0][3]), sep="\n")


if __name__ == "__main__":
    main()
