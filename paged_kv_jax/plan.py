"""The plan of one step: which query tokens there are, where they are written and what they see.

A plan is computed once a step and used by every layer. It is the ragged contract that serving
systems share (block table, kv lengths, cumulative query lengths, slot mapping), as a pytree.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paged_kv_jax.cascade import SharedPrefix, find_shared_prefix
from paged_kv_jax.errors import ResultCode


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "block_table", "kv_lens", "cu_q_lens", "slot_mapping", "positions", "token_rows", "errors",
        "shared_prefix",
    ),
    meta_fields=("block_size", "max_query_len"),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What one step needs, for B rows and T query tokens.

    Always holds: row b's query tokens are `cu_q_lens[b] : cu_q_lens[b + 1]`, in order of position;
    query token i of a row with q tokens and kv length n sits at position `n - q + i`; a row with
    kv length 0 takes no part, and its tokens are written nowhere and see nothing.

    Attributes:
      block_table: int32 [B, M], each row's blocks in order; -1 for "no block".
      kv_lens: int32 [B], tokens of each row including this step's; 0 for a row that takes no part.
      cu_q_lens: int32 [B + 1], cumulative query lengths, starting with 0.
      slot_mapping: int32 [T], slot each token is written to, -1 for nowhere.
      positions: int32 [T], position of each token in its sequence; 0 where there is no token.
      token_rows: int32 [T], row of each token, -1 where there is no token.
      errors: int32 [], sticky word; see `paged_kv_jax.errors`.
      block_size: P (static).
      max_query_len: no row brings more query tokens than that (static).
      shared_prefix: what rows have in common, for attention to compute once; None where the plan was
        not asked for it.
    """

    block_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    slot_mapping: jax.Array
    positions: jax.Array
    token_rows: jax.Array
    errors: jax.Array
    block_size: int
    max_query_len: int
    shared_prefix: SharedPrefix | None = None

    @property
    def num_rows(self) -> int:
        """B, rows of the batch."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, query tokens of the batch, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def last_tokens(self) -> jax.Array:
        """int32 [B], index in [0, T) of each row's last query token (0 for a row without any)."""
        return jnp.maximum(self.cu_q_lens[1:] - 1, 0)


def uniform_plan(
    block_table: jax.Array,
    kv_lens: jax.Array,
    takes_part: jax.Array,
    *,
    q_len: int,
    block_size: int,
) -> Plan:
    """The plan in which every row has room for exactly `q_len` tokens: token b * q_len + i is row b's.

    Args:
      block_table: int32 [B, M].
      kv_lens: int32 [B], tokens including this step's.
      takes_part: bool [B]; the other rows keep their place but write nothing and see nothing.
      q_len: query tokens of every row.
      block_size: P.
    """
    num_rows = kv_lens.shape[0]
    fits = _row_fits(block_table, kv_lens, q_len, block_size)
    errors = _overflow_bit(takes_part & ~fits)
    live = takes_part & fits
    kv_lens = jnp.where(live, kv_lens, 0)
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), q_len)
    offsets = jnp.tile(jnp.arange(q_len, dtype=jnp.int32), num_rows)
    has_token = jnp.repeat(live, q_len)
    positions = jnp.where(has_token, kv_lens[rows] - q_len + offsets, 0)
    return Plan(
        block_table=block_table,
        kv_lens=kv_lens,
        cu_q_lens=jnp.arange(num_rows + 1, dtype=jnp.int32) * q_len,
        slot_mapping=_slots(block_table, rows, positions, has_token, block_size),
        positions=positions,
        token_rows=jnp.where(has_token, rows, -1),
        errors=errors,
        block_size=block_size,
        max_query_len=q_len,
    )


def ragged_plan(
    block_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    *,
    num_tokens: int,
    max_query_len: int,
    block_size: int,
) -> Plan:
    """The plan in which the rows' tokens are packed one after another into T = `num_tokens` places.

    All or nothing per row: a row whose tokens do not fit (too many for `max_query_len`, for what is
    left of `num_tokens`, for its kv length or for its table) is left out and sets PLAN_OVERFLOW;
    the rows after it that would start past it are left out too, as rows are served in order.

    Args:
      block_table: int32 [B, M].
      kv_lens: int32 [B], tokens including this step's.
      q_lens: int32 [B], this step's tokens; 0 for a row that takes no part.
      num_tokens: T.
      max_query_len: the most tokens that one row may bring.
      block_size: P.
    """
    num_rows = kv_lens.shape[0]
    wanted = q_lens
    fits = (wanted <= max_query_len) & _row_fits(block_table, kv_lens, wanted, block_size)
    # Bounded by T + 1 each, so that the sum over the rows cannot wrap.
    ends = jnp.cumsum(jnp.where(fits, jnp.clip(wanted, 0, num_tokens + 1), 0), dtype=jnp.int32)
    live = fits & (wanted > 0) & (ends <= num_tokens)
    errors = _overflow_bit((wanted != 0) & ~live)
    kv_lens = jnp.where(live, kv_lens, 0)
    q_lens = jnp.where(live, wanted, 0)
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(cu_q_lens[1:], tokens, side="right", method="scan_unrolled").astype(
        jnp.int32
    )
    has_token = rows < num_rows
    rows = jnp.minimum(rows, num_rows - 1)
    positions = kv_lens[rows] - q_lens[rows] + tokens - cu_q_lens[rows]
    positions = jnp.where(has_token, positions, 0)
    return Plan(
        block_table=block_table,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        slot_mapping=_slots(block_table, rows, positions, has_token, block_size),
        positions=positions,
        token_rows=jnp.where(has_token, rows, -1),
        errors=errors,
        block_size=block_size,
        max_query_len=max_query_len,
    )


def plan_from_tables(
    block_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array | int,
    *,
    block_size: int,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
    shared_prefix: bool = False,
) -> Plan:
    """A plan from the tables of a scheduler of your own, with no `BlockState` involved.

    Args:
      block_table: int32 [B, M], each row's blocks in order, -1 beyond them.
      kv_lens: int32 [B], tokens of each row including this step's; 0 for a row that takes no part.
      q_lens: this step's tokens of each row. An int q: every row has q places (T = B * q), the
        decode layout. int32 [B]: the rows are packed one after another.
      block_size: P of the pool, a power of two.
      num_tokens: T, required where `q_lens` is an array.
      max_query_len: the most tokens one row may bring; T if not given. Only for an array `q_lens`.
      shared_prefix: as for `make_plan`.

    Returns:
      The plan. A row that does not fit is left out and sets PLAN_OVERFLOW in `plan.errors`.

    Raises:
      ValueError, TypeError: shapes, dtypes or static arguments that cannot work.
    """
    block_table = as_int32("block_table", block_table, 2)
    kv_lens = as_int32("kv_lens", kv_lens, 1)
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} must be a power of two")
    if block_table.shape[0] != kv_lens.shape[0]:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows and kv_lens {kv_lens.shape[0]}; "
            "both must have one entry per row"
        )
    return build_plan(
        block_table, kv_lens, kv_lens > 0, q_lens, block_size=block_size,
        num_tokens=num_tokens, max_query_len=max_query_len, shared_prefix=shared_prefix,
    )  # fmt: skip


def build_plan(
    block_table: jax.Array,
    kv_lens: jax.Array,
    takes_part: jax.Array,
    q_lens: jax.Array | int,
    *,
    block_size: int,
    num_tokens: int | None,
    max_query_len: int | None,
    shared_prefix: bool,
) -> Plan:
    """The uniform plan for an int `q_lens`, the ragged one for an array; checks what is static."""
    if isinstance(q_lens, int):
        if q_lens < 1:
            raise ValueError(f"the query length of every row is {q_lens}; it must be at least 1")
        if num_tokens is not None or max_query_len is not None:
            raise ValueError(
                f"{num_tokens=} and {max_query_len=} are for query lengths given as an array; an int "
                "gives every row the same number of places"
            )
        plan = uniform_plan(block_table, kv_lens, takes_part, q_len=q_lens, block_size=block_size)
    else:
        q_lens = as_int32("the query lengths", q_lens, 1)
        if q_lens.shape != kv_lens.shape:
            raise ValueError(
                f"the query lengths have shape {q_lens.shape}; there are {kv_lens.shape[0]} rows"
            )
        if num_tokens is None:
            raise ValueError(
                "num_tokens is required where the query lengths are an array: it is the static "
                "number of token places T that the rows are packed into"
            )
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} must be at least 1")
        max_query_len = num_tokens if max_query_len is None else max_query_len
        if not 1 <= max_query_len <= num_tokens:
            raise ValueError(
                f"max_query_len={max_query_len} must be in [1, num_tokens={num_tokens}]"
            )
        plan = ragged_plan(
            block_table, kv_lens, jnp.where(takes_part, q_lens, 0),
            num_tokens=num_tokens, max_query_len=max_query_len, block_size=block_size,
        )  # fmt: skip
    return with_shared_prefix(plan) if shared_prefix else plan


def with_shared_prefix(plan: Plan) -> Plan:
    """The plan with what its rows have in common."""
    found = find_shared_prefix(
        plan.block_table, plan.kv_lens, plan.cu_q_lens, block_size=plan.block_size
    )
    return dataclasses.replace(plan, shared_prefix=found)


def as_int32(name: str, value: jax.Array, ndim: int) -> jax.Array:
    """`value` as an int32 array of `ndim` dimensions, or a TypeError/ValueError that names it."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be an integer array")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; it must have {ndim} dimension(s)")
    return narrow(array)


def narrow(array: jax.Array) -> jax.Array:
    """An integer array as int32; values past its ends stay at them, where they are out of range."""
    info = jnp.iinfo(jnp.int32)
    if jnp.iinfo(array.dtype).max > info.max:
        array = jnp.clip(array, max(info.min, jnp.iinfo(array.dtype).min), info.max)
    return array.astype(jnp.int32)


def _row_fits(
    block_table: jax.Array, kv_lens: jax.Array, q_lens: jax.Array | int, block_size: int
) -> jax.Array:
    capacity = block_table.shape[1] * block_size
    return (kv_lens >= q_lens) & (kv_lens <= capacity) & (jnp.asarray(q_lens) >= 0)


def _overflow_bit(row_failed: jax.Array) -> jax.Array:
    return jnp.where(jnp.any(row_failed), jnp.int32(ResultCode.PLAN_OVERFLOW.bit), jnp.int32(0))


def _slots(
    block_table: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    has_token: jax.Array,
    block_size: int,
) -> jax.Array:
    """int32 [T], the slot of each token; -1 where there is no token or no block."""
    blocks = block_table[rows, jnp.where(has_token, positions // block_size, 0)]
    return jnp.where(has_token & (blocks >= 0), blocks * block_size + positions % block_size, -1)
