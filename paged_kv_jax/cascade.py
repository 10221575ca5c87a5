"""Attention in parts: what rows have in common is read once, and partial results are merged.

Rows that begin with the same blocks (samples of one prompt, requests with one system prompt) need
not read them one by one: one pass computes all their queries over the common prefix, a second each
row's queries over the rest of its own, and the two are merged by their log-sum-exps. That is the
cascade of FlashInfer (Ye et al., 2025) and of Hydragen (Juravsky et al., 2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

# A prefix of fewer tokens is not worth a pass of its own: kernels read keys in tiles of 128, so it
# would fill no tile.
MIN_SHARED_TOKENS = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("block_table", "kv_lens", "cu_q_lens", "own_block_table", "own_kv_lens"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The two passes of a plan whose rows have beginnings in common, for B rows.

    Groups are rows that follow one another (rows that take no part do not count) and share their
    first blocks. There are at most B groups; the places of the others are empty.

    Always holds: a group's prefix ends at or before the first query token of each of its rows, so
    all its queries see all of it.

    Attributes:
      block_table: int32 [B, M], the blocks of each group; only its prefix counts.
      kv_lens: int32 [B], tokens of each group's prefix, a multiple of P; 0 where nothing is shared.
      cu_q_lens: int32 [B + 1], cumulative query tokens of the groups, up to the last one that shares
        something. Places of rows that take no part lie within groups, too.
      own_block_table: int32 [B, M], what is left of each row's blocks.
      own_kv_lens: int32 [B], what is left of each row's tokens.
    """

    block_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    own_block_table: jax.Array
    own_kv_lens: jax.Array


def find_shared_prefix(
    block_table: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array, *, block_size: int
) -> SharedPrefix:
    """Which consecutive rows share how many leading blocks.

    A row joins the group of the row before it if they share `MIN_SHARED_TOKENS` at least, and at
    least half of what either of them shares with its other neighbour: samples of one long prompt are
    a group even where all prompts begin with the same few words.

    Args:
      block_table: int32 [B, M], -1 for "no block".
      kv_lens: int32 [B]; 0 for a row that takes no part.
      cu_q_lens: int32 [B + 1]; a row that takes part has at most as many query tokens as keys.
      block_size: P.
    """
    num_rows, max_blocks = block_table.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    column = jnp.arange(max_blocks, dtype=jnp.int32)

    # Rows that take part first, in their order.
    order = jnp.argsort(kv_lens == 0, stable=True)
    takes_part = kv_lens[order] > 0
    table = block_table[order]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    seen_whole = (kv_lens - q_lens)[order] // block_size  # blocks that all queries of the row see

    # Blocks that each row shares with the one before it.
    differs = (table != jnp.roll(table, 1, axis=0)) | (table < 0)
    shared = jnp.min(jnp.where(differs, column, max_blocks), axis=1)
    shared = jnp.minimum(shared, jnp.minimum(seen_whole, jnp.roll(seen_whole, 1)))
    shared = jnp.where(takes_part & (row > 0), shared, 0)

    beside = jnp.maximum(jnp.roll(shared, 1), jnp.roll(shared, -1))
    starts = (shared * block_size < MIN_SHARED_TOKENS) | (2 * shared < beside)
    # Rows that stand alone, one after another, are one group without a prefix rather than many.
    alone = starts & jnp.roll(starts, -1)
    starts &= ~(alone & jnp.roll(alone, 1)) | (row == 0)
    group = jnp.cumsum(starts, dtype=jnp.int32) - 1

    def least(values: jax.Array) -> jax.Array:  # of each group; the greatest int32 for none
        return jax.ops.segment_min(values, group, num_segments=num_rows)

    group_blocks = least(jnp.where(starts, jnp.iinfo(jnp.int32).max, shared))
    has_prefix = (group_blocks <= max_blocks) & (
        group_blocks >= -(-MIN_SHARED_TOKENS // block_size)
    )
    group_blocks = jnp.where(has_prefix, group_blocks, 0)
    first_token = least(jnp.where(takes_part, cu_q_lens[order], cu_q_lens[-1]))
    first_token = jnp.minimum(first_token, cu_q_lens[-1]).at[0].set(0)
    group_cu_q_lens = jnp.append(first_token, cu_q_lens[-1])
    # Nothing is left to do after the last group with a prefix, or at all where there is none.
    end = jnp.max(jnp.where(has_prefix, group_cu_q_lens[1:], 0))

    own_start = (
        jnp.zeros_like(kv_lens)
        .at[order]
        .set(jnp.where(takes_part, group_blocks[group], 0), unique_indices=True)
    )
    own_column = column + own_start[:, None]
    own_table = jnp.take_along_axis(
        block_table, jnp.minimum(own_column, max_blocks - 1), axis=1, mode="promise_in_bounds"
    )
    return SharedPrefix(
        block_table=table[jnp.minimum(least(row), num_rows - 1)],
        kv_lens=group_blocks * block_size,
        cu_q_lens=jnp.minimum(group_cu_q_lens, end),
        own_block_table=jnp.where(own_column < max_blocks, own_table, -1),
        own_kv_lens=kv_lens - own_start * block_size,
    )


def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Attention over two disjoint sets of keys, from the attention over each.

    With $w = e^{lse}$: $out = (w_a\,out_a + w_b\,out_b) / (w_a + w_b)$, $lse = \log(w_a + w_b)$; the
    online softmax of Milakov & Gimelshein (2018), as merged states in FlashInfer (Ye et al., 2025).
    Commutative, and associative but for rounding. A partial result over no keys (a log-sum-exp of
    -inf, whatever its output) changes nothing, and two of them give 0 and -inf.

    Letters: T query tokens, H query heads, D head_dim.

    Args:
      out_a, out_b: [T, H, D], of one floating-point dtype; float32 spares partial results a rounding.
      lse_a, lse_b: float32 [T, H], natural log. Sinks belong in one of the two only.

    Returns:
      The output, [T, H, D] in the inputs' dtype, and the log-sum-exp, float32 [T, H].

    Raises:
      ValueError, TypeError: shapes or dtypes that do not go together.
    """
    if out_a.ndim != 3 or out_a.shape != out_b.shape:
        raise ValueError(f"out_a has shape {out_a.shape} and out_b {out_b.shape}; both [T, H, D]")
    if out_a.dtype != out_b.dtype or not jnp.issubdtype(out_a.dtype, jnp.floating):
        raise TypeError(
            f"out_a has dtype {out_a.dtype} and out_b {out_b.dtype}; both must be of one "
            "floating-point dtype"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:2]:
            raise ValueError(f"{name} has shape {lse.shape}; it must be [T, H] = {out_a.shape[:2]}")
        if lse.dtype != jnp.float32:
            raise TypeError(f"{name} has dtype {lse.dtype}; it must be float32")

    top = jnp.maximum(lse_a, lse_b)
    safe_top = jnp.where(top == -jnp.inf, 0, top)
    weight_a, weight_b = jnp.exp(lse_a - safe_top), jnp.exp(lse_b - safe_top)
    total = weight_a + weight_b  # 1 at least, but for 0 where both are empty

    def weighted(weight: jax.Array, lse: jax.Array, out: jax.Array) -> jax.Array:
        share = (weight / jnp.where(total > 0, total, 1))[..., None]
        return jnp.where((lse == -jnp.inf)[..., None], 0, share * out.astype(jnp.float32))

    out = weighted(weight_a, lse_a, out_a) + weighted(weight_b, lse_b, out_b)
    return out.astype(out_a.dtype), safe_top + jnp.log(total)
