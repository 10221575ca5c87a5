"""Choosing the next token from logits, with options of its own for each row. Jittable.

Greedy, temperature, top-k, top-p, min-p and a penalty on repetition. What is kept of a distribution is
found by bisection over the logits' bits instead of sorting a vocabulary: each cut is a cutoff.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; hashable. Cuts apply in the order of the fields.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only the k most likely tokens, and those as likely as the last of them; None for all.
      top_p: only the fewest tokens whose probabilities add up to p (nucleus sampling; Holtzman et
        al., 2020), and those as likely as the last of them; 1 for all.
      min_p: only tokens at least p times as likely as the most likely one (Nguyen et al., 2024); 0
        for all.
      repetition_penalty: logits of tokens that the prompt or the output holds are divided by it if
        positive, multiplied by it if not, before all else (CTRL; Keskar et al., 2019); 1 for none.

    Raises:
      ValueError: a field has a value that cannot work.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be at least 0, and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be at least 0 and at most 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be above 0, and finite"
            )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, eq=False)
class SamplingRows:
    """A `Sampling` for each of B rows, as arrays, so that a change in them compiles nothing.

    Attributes:
      temperature: float32 [B].
      top_k: int32 [B]; 0 for all.
      top_p: float32 [B].
      min_p: float32 [B].
      repetition_penalty: float32 [B].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array

    @classmethod
    def of(cls, sampling: Sampling, num_rows: int) -> Self:
        """The same for every row."""
        return cls(
            temperature=jnp.full(num_rows, sampling.temperature, jnp.float32),
            top_k=jnp.full(num_rows, sampling.top_k or 0, jnp.int32),
            top_p=jnp.full(num_rows, sampling.top_p, jnp.float32),
            min_p=jnp.full(num_rows, sampling.min_p, jnp.float32),
            repetition_penalty=jnp.full(num_rows, sampling.repetition_penalty, jnp.float32),
        )


def sample(
    logits: jax.Array, keys: jax.Array, steps: jax.Array, sampling: Sampling | SamplingRows
) -> jax.Array:
    """The next token of each row.

    A row's choice depends on its own logits, key and step alone, not on the batch it is in.

    Args:
      logits: float [B, V], with `penalise_repetition` applied where it is asked for.
      keys: typed PRNG keys [B], one per row.
      steps: int32 [B], folded into the row's key: which of its tokens is chosen.
      sampling: how; `repetition_penalty` is not looked at here.

    Returns:
      int32 [B].
    """
    num_rows = logits.shape[0]
    rows = SamplingRows.of(sampling, num_rows) if isinstance(sampling, Sampling) else sampling
    logits = logits.astype(jnp.float32)
    most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_drawn = rows.temperature > 0

    def draw() -> jax.Array:
        scaled = logits / jnp.where(is_drawn, rows.temperature, 1)[:, None]
        is_cut = is_drawn & ((rows.top_k > 0) | (rows.top_p < 1))
        scaled = jax.lax.cond(jnp.any(is_cut), lambda x: _cut(x, rows), lambda x: x, scaled)
        least = jnp.max(scaled, axis=-1) + jnp.log(rows.min_p)
        scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
        row_keys = jax.vmap(jax.random.fold_in)(keys, steps)
        drawn = jax.vmap(jax.random.categorical)(row_keys, scaled)
        return jnp.where(is_drawn, drawn.astype(jnp.int32), most_likely)

    return jax.lax.cond(jnp.any(is_drawn), draw, lambda: most_likely)


def penalise_repetition(
    logits: jax.Array, penalty: jax.Array, tokens: jax.Array, lens: jax.Array
) -> jax.Array:
    """Logits in which each row's own tokens are less likely; unchanged where every penalty is 1.

    Args:
      logits: float [B, V].
      penalty: float32 [B], `Sampling.repetition_penalty`.
      tokens: int32 [B, C], prompts and outputs; those outside the vocabulary count for nothing.
      lens: int32 [B], how many of them there are.

    Returns:
      float32 [B, V].
    """
    num_rows, vocab_size = logits.shape

    def penalise(logits: jax.Array) -> jax.Array:
        is_token = jnp.arange(tokens.shape[1], dtype=jnp.int32) < lens[:, None]
        column = jnp.where(is_token & (tokens >= 0), tokens, vocab_size)
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        seen = jnp.zeros(logits.shape, bool).at[row, column].set(True, mode="drop")
        factor = penalty[:, None]
        return jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)

    return jax.lax.cond(
        jnp.any(penalty != 1), penalise, lambda logits: logits, logits.astype(jnp.float32)
    )


def _cut(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Logits [B, V] with all that `top_k`, and then `top_p`, leaves out at -inf."""
    vocab_size = logits.shape[-1]
    enough = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab_size), vocab_size)
    cutoff = _cutoff(logits, jnp.ones_like(logits), enough.astype(jnp.float32))
    logits = jnp.where(_ordered(logits) >= cutoff[:, None], logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    cutoff = _cutoff(logits, weights, rows.top_p * jnp.sum(weights, axis=-1))
    # Without a cut, not even what is too unlikely to change the sum is left out.
    is_kept = (_ordered(logits) >= cutoff[:, None]) | (rows.top_p == 1)[:, None]
    return jnp.where(is_kept, logits, -jnp.inf)


def _cutoff(logits: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """uint32 [B]: the highest cutoff for which the logits at or above it weigh at least `enough`."""
    ordered = _ordered(logits)

    def set_bit(nth: jax.Array, cutoff: jax.Array) -> jax.Array:
        higher = cutoff | (jnp.uint32(1) << (31 - nth).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= higher[:, None], weights, 0), axis=-1)
        return jnp.where(weight >= enough, higher, cutoff)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(logits.shape[0], jnp.uint32))


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 in the order of the float32 `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
