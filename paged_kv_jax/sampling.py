"""Choosing the next token from logits: greedy, temperature, top-k and top-p. Jittable."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; hashable, a static argument.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only the k most likely tokens; None for all.
      top_p: only the fewest tokens whose probabilities add up to p (nucleus sampling; Holtzman et
        al., 2020), after `top_k`; 1 for all.

    Raises:
      ValueError: a field has a value that cannot work.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


def sample(logits: jax.Array, keys: jax.Array, steps: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row.

    A row's choice depends on its own logits, key and step alone, not on the batch it is in.

    Args:
      logits: float [B, V].
      keys: typed PRNG keys [B], one per row.
      steps: int32 [B], folded into the row's key: which of its tokens is chosen.
      sampling: how.

    Returns:
      int32 [B].
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    vocab_size = logits.shape[-1]
    scaled = logits.astype(jnp.float32) / sampling.temperature
    # Most likely first; without a cut there is no need to sort.
    if sampling.top_k is None and sampling.top_p == 1:
        candidates, tokens = scaled, jnp.broadcast_to(jnp.arange(vocab_size), scaled.shape)
    else:
        candidates, tokens = jax.lax.top_k(scaled, min(sampling.top_k or vocab_size, vocab_size))
    if sampling.top_p < 1:
        probability = jax.nn.softmax(candidates, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        candidates = jnp.where(before < sampling.top_p, candidates, -jnp.inf)
    row_keys = jax.vmap(jax.random.fold_in)(keys, steps)
    choice = jax.vmap(jax.random.categorical)(row_keys, candidates)
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
