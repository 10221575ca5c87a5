"""Paged attention in plain XLA: every platform, bounded memory, work that follows the lengths.

The query tokens are cut into tiles of one row each, and each query tile's visible keys into tiles of
a few blocks. The (query tile, key tile) pairs of all rows form one list of work, known on the device
from cumulative sums, and a loop takes a fixed number of pairs from it each time round, whichever rows
they belong to: skewed lengths cost what they hold, not what the longest row holds. Each round folds
its pairs into a running float32 softmax per query tile (the "stream-K" partition of Osama et al.,
2023, with the online softmax of Milakov & Gimelshein, 2018).
"""

import jax
import jax.numpy as jnp

# Keys of one tile; a larger block is a tile of its own.
KEY_TILE = 128
# Query tokens of one tile, at most. On a CPU few, since a row that decodes among chunks of prompts
# costs a whole tile there, and prompts are no slower for it.
QUERY_TILE_CPU = 8
QUERY_TILE = 32
# Pairs of one round: on a CPU few enough that their keys and values stay in a core's cache between
# the gather and the products, elsewhere enough to fill the machine.
PAIRS_PER_ROUND_CPU = 16
PAIRS_PER_ROUND = 64
# Elements of a head in one product of queries and keys on a CPU; the products of a head's parts are
# summed. XLA sums one element after another there, which rounds the worse the longer it goes on;
# short parts are the faster ones in decode, too.
PART_DIM_CPU = 16


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array | int,
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of ragged query tokens over the blocks of their rows.

    Args:
      q: [T, H, D].
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      block_table: int32 [B, M], -1 for "no block".
      kv_lens: int32 [B].
      cu_q_lens: int32 [B + 1].
      max_query_len: no row brings more query tokens (static).
      scale, causal, logits_soft_cap, sliding_window, sinks [H], alibi_slopes [H]: as in
        `paged_kv_jax.paged_attention`.

    Returns:
      out [T, H, D] in q's dtype, and the log-sum-exp [T, H], float32, natural log.
    """
    if not causal and (sliding_window is not None or alibi_slopes is not None):
        raise ValueError(
            f"causal=False with {sliding_window=} or alibi_slopes; neither goes with it"
        )
    num_tokens, num_heads, head_dim = q.shape
    num_rows, max_blocks = block_table.shape
    block_size, num_kv_heads = k_pool.shape[2:4]
    group = num_heads // num_kv_heads
    is_cpu = jax.default_backend() == "cpu"
    # Products of 16-bit operands where both are the same; CPUs would gain nothing from it.
    product = q.dtype if q.dtype == k_pool.dtype and not is_cpu else jnp.dtype(jnp.float32)
    part_dim = PART_DIM_CPU if is_cpu and head_dim % PART_DIM_CPU == 0 else head_dim
    parts = head_dim // part_dim
    query_tile = min(QUERY_TILE_CPU if is_cpu else QUERY_TILE, max_query_len)
    tile_blocks = max(1, KEY_TILE // block_size)
    key_tile = tile_blocks * block_size

    # Query tiles: row b has ceil(q_len / query_tile) of them, all rows together at most num_tiles.
    num_tiles = (num_tokens + num_rows * (query_tile - 1)) // query_tile
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    row_tiles = -(-q_lens // query_tile)
    cu_tiles = jnp.cumsum(row_tiles, dtype=jnp.int32)
    first_tile = cu_tiles - row_tiles
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(cu_tiles, tile, side="right", method="compare_all").astype(jnp.int32)
    is_tile = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    token = (tile - first_tile[row])[:, None] * query_tile
    token += jnp.arange(query_tile, dtype=jnp.int32)
    is_token = is_tile[:, None] & (token < q_lens[row][:, None])  # [tiles, query_tile]
    position = (kv_lens - q_lens)[row][:, None] + token
    if not causal:
        position = (kv_lens - 1)[row][:, None]  # as far as anyone sees
    position = jnp.where(is_token, position, -1)
    # Places without a token lie past the end and read zeros.
    token = jnp.where(is_token, cu_q_lens[row][:, None] + token, num_tokens)
    queries = q.at[token].get(mode="fill", fill_value=0).astype(product)
    # R = query_tile * group stands below for the queries of a tile that share a KV head. A part of a
    # head is to the product of queries and keys a head of its own.
    queries = queries.reshape(num_tiles, query_tile, num_kv_heads, group, parts, part_dim)
    queries = queries.transpose(0, 2, 4, 1, 3, 5)
    queries = queries.reshape(num_tiles, num_kv_heads * parts, query_tile * group, part_dim)

    # Key tiles [first, last) of each query tile, one at least, and their places in the list of pairs.
    last = -(-(jnp.max(position, axis=1) + 1) // key_tile)
    first = jnp.zeros_like(last)
    if sliding_window is not None:
        oldest = jnp.min(jnp.where(is_token, position, jnp.iinfo(jnp.int32).max), axis=1)
        first = jnp.minimum(jnp.maximum(oldest - sliding_window + 1, 0) // key_tile, last)
    last = jnp.where(is_tile, jnp.maximum(last, first + 1), first)
    cu_pairs = jnp.cumsum(last - first, dtype=jnp.int32)
    num_pairs = cu_pairs[-1]
    pairs_per_round = min(
        PAIRS_PER_ROUND_CPU if is_cpu else PAIRS_PER_ROUND,
        num_tiles * -(-max_blocks // tile_blocks),
    )
    highest = jax.lax.Precision.HIGHEST  # float32 products, where the default would be TF32

    def of_heads(x: jax.Array) -> jax.Array:  # [H] -> [K, R]
        return jnp.tile(x.astype(jnp.float32).reshape(num_kv_heads, group), (1, query_tile))

    def for_each_head(x: jax.Array) -> jax.Array:  # [pairs, query, key] -> [pairs, 1, R, key]
        return jnp.repeat(x, group, axis=1)[:, None]

    def fold_round(carry):
        start, top, total, acc = carry
        pair = start + jnp.arange(pairs_per_round, dtype=jnp.int32)
        of = jnp.searchsorted(cu_pairs, pair, side="right", method="compare_all").astype(jnp.int32)
        is_pair = of < num_tiles
        of = jnp.minimum(of, num_tiles - 1)  # [pairs]: the query tile of each pair
        nth_tile = jnp.where(is_pair, last[of] - (cu_pairs[of] - pair), 0)

        column = nth_tile[:, None] * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
        blocks = block_table[row[of][:, None], jnp.minimum(column, max_blocks - 1)]
        is_block = (column < max_blocks) & (blocks >= 0)
        key_position = nth_tile[:, None] * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        query_position = jnp.where(is_pair[:, None], position[of], -1)
        sees = key_position[:, None, :] <= query_position[:, :, None]  # [pairs, query, key]
        if sliding_window is not None:
            sees &= key_position[:, None, :] > query_position[:, :, None] - sliding_window
        sees &= jnp.repeat(is_block, block_size, axis=1)[:, None, :]
        # Worked out once: fused into what follows, they would be again for each element there.
        blocks, sees, is_seen = jax.lax.optimization_barrier(
            (jnp.where(is_block, blocks, 0), sees, jnp.any(sees, axis=1))
        )
        sees = for_each_head(sees)

        def gather(pool: jax.Array, width: int) -> jax.Array:  # head by head, or part by part
            # Reshaped here: ahead of the loop, it fuses with a one-token write, and XLA copies pools.
            pool = pool.reshape(*pool.shape[:3], num_kv_heads * head_dim // width, width)
            heads = jnp.arange(pool.shape[3], dtype=jnp.int32)[:, None]
            tiles = pool[layer, blocks[:, None, :], :, heads]
            return tiles.reshape(pairs_per_round, pool.shape[3], key_tile, width).astype(product)

        scores = jnp.einsum(
            "nkrd,nksd->nkrs", queries[of], gather(k_pool, part_dim),
            precision=highest, preferred_element_type=jnp.float32,
        )  # fmt: skip
        scores = scores.reshape(
            pairs_per_round, num_kv_heads, parts, query_tile * group, key_tile
        ).sum(axis=2)
        scores *= scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        if alibi_slopes is not None:
            distance = (key_position[:, None, :] - query_position[:, :, None]).astype(jnp.float32)
            scores += of_heads(alibi_slopes)[..., None] * for_each_head(distance)
        scores = jnp.where(sees, scores, -jnp.inf)

        # The round's pairs belong to consecutive query tiles, as each tile has a pair: those from
        # of[0] on, at most as many as there are pairs. What they have so far is read and written as
        # one slice, since scatters are slow.
        nth = of - of[0]
        joins = is_pair & (nth == jnp.arange(pairs_per_round, dtype=jnp.int32)[:, None])
        old_top, old_total, old_acc = (
            jax.lax.dynamic_slice_in_dim(so_far, of[0], pairs_per_round)
            for so_far in (top, total, acc)
        )
        pair_top = jnp.max(scores, axis=-1)  # [pairs, K, R]
        new_top = jnp.max(jnp.where(joins[:, :, None, None], pair_top, -jnp.inf), axis=1)
        new_top = jnp.maximum(new_top, old_top)
        safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0)
        weights = jnp.where(sees, jnp.exp(scores - safe_top[nth][..., None]), 0)
        # Unseen slots may hold NaN or Inf, which a weight of 0 would not silence.
        values = jnp.where(is_seen[:, None, :, None], gather(v_pool, head_dim), 0)
        pair_acc = jnp.einsum(
            "nkrs,nksd->nkrd", weights.astype(product), values,
            precision=highest, preferred_element_type=jnp.float32,
        )  # fmt: skip
        joins = joins.astype(jnp.float32)
        faded = jnp.exp(old_top - safe_top)
        new_total = old_total * faded + jnp.einsum(
            "mn,nkr->mkr", joins, jnp.sum(weights, axis=-1), precision=highest
        )
        new_acc = old_acc * faded[..., None] + jnp.einsum(
            "mn,nkrd->mkrd", joins, pair_acc, precision=highest
        )
        return (
            start + pairs_per_round,
            *(
                jax.lax.dynamic_update_slice_in_dim(so_far, new, of[0], axis=0)
                for so_far, new in ((top, new_top), (total, new_total), (acc, new_acc))
            ),
        )

    # Longer by a round than there are tiles, so that a round's slice never passes the end.
    per_head = (num_tiles + pairs_per_round, num_kv_heads, query_tile * group)
    top = jnp.full(per_head, -jnp.inf, jnp.float32)
    total = jnp.zeros(per_head, jnp.float32)
    if sinks is not None:  # a key with a logit of its own and no value
        top, total = jnp.broadcast_to(of_heads(sinks), per_head), jnp.ones_like(total)
    _, top, total, acc = jax.lax.while_loop(
        lambda carry: carry[0] < num_pairs,
        fold_round,
        (jnp.int32(0), top, total, jnp.zeros((*per_head, head_dim), jnp.float32)),
    )
    # Each token's place among the tiles; what was computed for places without a token is left there.
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all")
    is_token = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    nth_token = token - cu_q_lens[row]
    nth_tile = jnp.where(is_token, first_tile[row] + nth_token // query_tile, 0)
    top, total, acc = (
        x.reshape(per_head[0], num_kv_heads, query_tile, group, *x.shape[3:])[
            nth_tile, :, nth_token % query_tile
        ].reshape(num_tokens, num_heads, *x.shape[3:])
        for x in (top, total, acc)
    )
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(is_token[:, None] & (total > 0), top + jnp.log(total), -jnp.inf)
    return jnp.where(is_token[:, None, None], out, 0).astype(q.dtype), lse
