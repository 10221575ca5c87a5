"""A model of one attention layer that compiles in no time, and what it says computed by numpy alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv

VOCAB, HEADS, HEAD_DIM = 31, 2, 8
WIDTH = HEADS * HEAD_DIM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TinyModel:
    """Tokens and positions embedded, attention with one kv head, a projection to logits."""

    embedding: jax.Array
    head: jax.Array

    @classmethod
    def create(cls, seed: int = 0) -> "TinyModel":
        rng = np.random.default_rng(seed)
        embedding, head = rng.normal(size=(2, VOCAB, WIDTH)).astype(np.float32)
        return cls(jnp.asarray(embedding), jnp.asarray(head))

    def __call__(self, tokens, positions, pool, plan):
        angles = positions[:, None] * jnp.arange(1, WIDTH + 1)
        x = self.embedding[tokens] + jnp.sin(angles.astype(jnp.float32))
        key = x[:, None, :HEAD_DIM]
        pool = pkv.write(pool, 0, key, -key, plan)
        q = x.reshape(-1, HEADS, HEAD_DIM)
        return x + 3 * pkv.paged_attention(q, pool, 0, plan).reshape(-1, WIDTH), pool

    def logits(self, hidden):
        return hidden @ self.head.T

    def next_logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [V], the logits after `tokens`."""
        embedding, head = (np.asarray(x, np.float64) for x in (self.embedding, self.head))
        positions = np.arange(len(tokens))[:, None]
        x = embedding[tokens] + np.sin(positions * np.arange(1, WIDTH + 1))
        key, query = x[:, :HEAD_DIM], x[-1].reshape(HEADS, HEAD_DIM)
        scores = query @ key.T / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return head @ (x[-1] + 3 * (weights @ -key).reshape(WIDTH))

    def greedy(self, prompt: list[int], num_tokens: int, penalty: float = 1.0) -> list[int]:
        """The most likely tokens after `prompt`, one by one."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            logits = self.next_logits(tokens)
            seen = np.unique(tokens)
            logits[seen] = np.where(
                logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty
            )
            tokens.append(int(np.argmax(logits)))
        return tokens[len(prompt) :]


def cache_config(num_blocks: int, *, max_seqs: int = 4, block_size: int = 4, max_blocks: int = 10):
    return pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, num_blocks=num_blocks,
        block_size=block_size, max_seqs=max_seqs, max_blocks_per_seq=max_blocks, dtype="float32",
    )  # fmt: skip
