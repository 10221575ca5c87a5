"""Failure is a value until the host looks: result codes, the sticky word, and the one place that raises.

Inside `jax.jit` an operation reports per row with a result code and sets the code's bit in the
sticky word `errors` that `BlockState` and `Plan` carry, so that a failure in the middle of a long
`scan` is still visible after it. `raise_if_failed` turns the word into an exception on the host.
"""

import enum
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class ResultCode(enum.IntEnum):
    """Why a row failed. Results >= 0 are successes and count blocks."""

    OUT_OF_BLOCKS = -1
    INVALID_SEQ = -2
    SEQ_TOO_LONG = -3
    DUPLICATE_SEQ = -4
    INVALID_COUNT = -5
    PLAN_OVERFLOW = -6

    @property
    def bit(self) -> int:
        """The bit of the sticky word that this code sets."""
        return 1 << (-int(self) - 1)

    @property
    def remedy(self) -> str:
        """Cause and remedy in a sentence."""
        return _REMEDIES[self]


_REMEDIES = {
    ResultCode.OUT_OF_BLOCKS: (
        "the pool had too few free blocks for a row: free sequences first, or raise num_blocks"
    ),
    ResultCode.INVALID_SEQ: (
        "a seq_id was outside [0, max_seqs), or named a sequence that holds no blocks where a live "
        "one is needed, or a live child of a fork: pass -1 for padding rows, allocate before append, "
        "and free an id before it becomes a child"
    ),
    ResultCode.SEQ_TOO_LONG: (
        "a row would have passed max_blocks_per_seq blocks: raise max_blocks_per_seq or stop earlier"
    ),
    ResultCode.DUPLICATE_SEQ: (
        "a seq_id stood in more than one row of a call: give each sequence one row"
    ),
    ResultCode.INVALID_COUNT: (
        "a token count was negative or above the call's max_new_tokens, or a length or position was "
        "outside what the sequence still holds"
    ),
    ResultCode.PLAN_OVERFLOW: (
        "a row's query tokens did not fit the plan (num_tokens, max_query_len, or its own kv length "
        "and table): the row was left out; raise num_tokens or max_query_len, or plan fewer rows"
    ),
}


class PagedKVError(RuntimeError):
    """A sticky error word was set; `codes` lists the result codes it holds."""

    def __init__(self, codes: tuple[ResultCode, ...]):
        self.codes = codes
        lines = [f"{code.name} ({int(code)}): {code.remedy}" for code in codes]
        super().__init__("paged KV cache operations failed:\n  " + "\n  ".join(lines))


class HasErrors(Protocol):
    """Anything that carries a sticky word."""

    @property
    def errors(self) -> jax.Array:
        """int32 []."""
        ...


def sticky_bits(result: jax.Array) -> jax.Array:
    """The sticky word, int32 [], that result codes of any shape amount to (0: all succeeded)."""
    word = jnp.int32(0)
    for code in ResultCode:
        word |= jnp.where(jnp.any(result == code), jnp.int32(code.bit), jnp.int32(0))
    return word


def raise_if_failed(*carriers: HasErrors) -> None:
    """Raise if any operation that led to these states or plans failed; call it on the host.

    Args:
      *carriers: states, plans or caches; anything with a sticky word `errors`, int32 [].

    Raises:
      PagedKVError: names every code found, its cause and its remedy.
    """
    word = 0
    for carrier in carriers:
        word |= int(np.bitwise_or.reduce(np.asarray(carrier.errors), axis=None))
    if word:
        raise PagedKVError(tuple(code for code in ResultCode if word & code.bit))
