"""A decoder in plain JAX over a paged KV cache: the model is a function, the weights are a dict.

    python examples/plain_jax.py

Prompts of different length are packed into one prefill; then a `lax.scan` decodes all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 256, 64, 2, 4, 2, 16, 128
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9]]


# --8<-- [start:model]
@jax.jit
def init_params(key: jax.Array) -> dict:
    """Random weights; those of all layers are stacked along the first axis."""
    shapes = {
        "q": (LAYERS, WIDTH, HEADS, HEAD_DIM),
        "k": (LAYERS, WIDTH, KV_HEADS, HEAD_DIM),
        "v": (LAYERS, WIDTH, KV_HEADS, HEAD_DIM),
        "out": (LAYERS, HEADS, HEAD_DIM, WIDTH),
        "gate": (LAYERS, WIDTH, HIDDEN),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }
    embed_key, head_key, *keys = jax.random.split(key, 2 + len(shapes))
    layers = {
        name: jax.random.normal(key, shape) * 0.5 * WIDTH**-0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {
        "embed": jax.random.normal(embed_key, (VOCAB, WIDTH)),
        "layers": layers,
        "head": jax.random.normal(head_key, (WIDTH, VOCAB)),
    }


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm without weights."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of x [T, heads, HEAD_DIM]."""
    frequencies = 10000.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def step(
    params: dict, tokens: jax.Array, positions: jax.Array, pool: pkv.KVPool, plan: pkv.Plan
) -> tuple[jax.Array, pkv.KVPool]:
    """tokens, positions int32 [T] -> logits [T, VOCAB], and the pool with their keys and values."""

    def layer(carry, inputs):
        x, pool = carry
        index, weights = inputs
        h = norm(x)
        q = rotate(jnp.einsum("te,ehd->thd", h, weights["q"]), positions)
        k = rotate(jnp.einsum("te,ekd->tkd", h, weights["k"]), positions)
        v = jnp.einsum("te,ekd->tkd", h, weights["v"])
        pool = pkv.write(pool, index, k, v, plan)
        out = pkv.paged_attention(q, pool, index, plan)
        x += jnp.einsum("thd,hde->te", out, weights["out"])
        h = norm(x)
        x += (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
        return (x, pool), None

    x = params["embed"][tokens]
    (x, pool), _ = jax.lax.scan(layer, (x, pool), (jnp.arange(LAYERS), params["layers"]))
    return norm(x) @ params["head"], pool


# --8<-- [end:model]


@functools.partial(jax.jit, donate_argnames=("state", "pool"))
def prefill(params, state, pool, seq_ids, tokens, lengths):
    """Take prompts in, packed one after another in tokens [T]: the first new token of each, [B]."""
    state, result = pkv.allocate(state, seq_ids, lengths)
    plan = pkv.make_plan(state, seq_ids, lengths, result, num_tokens=tokens.shape[0])
    logits, pool = step(params, tokens, plan.positions, pool, plan)
    return jnp.argmax(logits[plan.last_tokens], axis=-1), state, pool


@functools.partial(jax.jit, static_argnames="num_steps", donate_argnames=("state", "pool"))
def decode(params, state, pool, seq_ids, token, num_steps):
    """`num_steps` greedy tokens after `token` [B], as [B, num_steps]."""

    def one(carry, _):
        state, pool, token = carry
        state, result = pkv.append(state, seq_ids, 1)
        plan = pkv.make_plan(state, seq_ids, 1, result)
        logits, pool = step(params, token, plan.positions, pool, plan)
        token = jnp.argmax(logits, axis=-1)
        return (state, pool, token), token

    (state, pool, _), tokens = jax.lax.scan(one, (state, pool, token), length=num_steps)
    return tokens.T, state, pool


def generate(params: dict, prompts: list[list[int]], max_new_tokens: int) -> np.ndarray:
    """Greedy continuations, [B, max_new_tokens]."""
    lengths = [len(prompt) for prompt in prompts]
    config = pkv.KVCacheConfig(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_blocks=64, block_size=8,
        max_seqs=len(prompts), max_blocks_per_seq=16, dtype=jnp.float32,
    )  # fmt: skip
    state, pool, seq_ids = pkv.init(config), pkv.init_pool(config), jnp.arange(len(prompts))
    packed = jnp.asarray(np.concatenate(prompts))
    first, state, pool = prefill(params, state, pool, seq_ids, packed, jnp.asarray(lengths))
    rest, state, pool = decode(params, state, pool, seq_ids, first, max_new_tokens - 1)
    pkv.raise_if_failed(state)  # out of blocks, for one
    return np.concatenate([first[:, None], rest], axis=1)


def main() -> None:
    """Three prompts through a random model."""
    print(generate(init_params(jax.random.key(0)), PROMPTS, max_new_tokens=24))


if __name__ == "__main__":
    main()
