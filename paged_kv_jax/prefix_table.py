"""The exact table behind prefix reuse: from a prompt's tokens to the blocks that hold them already.

`PrefixIndex` is a tree of held blocks, each named by its parent block, its tokens and a salt, and a hash
table to find them by. A hash is computed for every prefix that ends with a block, all of a prompt's at
once, so that a walk down the tree is one gather for all depths of all prompts, not a loop. What the
hash finds is compared token by token and parent by parent: a collision costs a hit, never makes one.
(Chained block hashes are vLLM's automatic prefix caching; the tree is SGLang's RadixAttention.)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paged_kv_jax.config import KVCacheConfig

# Places of the table where an entry may stand. With at most a quarter of the table taken, all of them
# are taken for one entry in about 4^16 = 4e9, which is then left out, and counted.
PROBES = 16


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "table", "slot", "hashes", "tokens", "salt", "parent", "depth", "last_used", "clock", "counts",
    ),
    meta_fields=(),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class PrefixIndex:
    """Which blocks hold which prefixes. A pytree; all of it lives on the device.

    Always holds (`check_index` tests it):
      * a held block is full, and the index counts as one of its references in `state.ref_count`, so
        that no sequence writes into it and its block isn't handed out;
      * the parent of a held block is held, unless the block is a prompt's first;
      * no two held blocks have the same parent, tokens and salt;
      * a parent was last used no earlier than its children.

    Attributes:
      table: int32 [C], the block at each place; -1 where there is none. C is a power of two >= 4 N.
      slot: int32 [N], the place in `table` of each held block; -1 for a block that is not held.
      hashes: uint32 [N, 2], hash of all tokens up to the block's last, and the salt.
      tokens: int32 [N, P], the block's own tokens.
      salt: int32 [N], keeps tenants, adapters or images apart.
      parent: int32 [N], the block before it; -1 for the first block of a prompt.
      depth: int32 [N], blocks before it.
      last_used: uint32 [N], `clock` when it was last found or committed.
      clock: uint32 [], counts calls; ages are compared modulo 2^32.
      counts: uint32 [3, 2], 64-bit counters (low, high): blocks looked up, blocks found, and blocks
        that a commit left out.
    """

    table: jax.Array
    slot: jax.Array
    hashes: jax.Array
    tokens: jax.Array
    salt: jax.Array
    parent: jax.Array
    depth: jax.Array
    last_used: jax.Array
    clock: jax.Array
    counts: jax.Array

    @property
    def num_blocks(self) -> int:
        """N, blocks of the pool."""
        return self.slot.shape[0]

    @property
    def block_size(self) -> int:
        """P."""
        return self.tokens.shape[1]

    @property
    def is_held(self) -> jax.Array:
        """bool [N], the blocks that the index refers to."""
        return self.slot >= 0


def init_prefix_index(config: KVCacheConfig) -> PrefixIndex:
    """An index that holds nothing."""
    return empty_index(config.num_blocks, config.block_size)


def empty_index(num_blocks: int, block_size: int) -> PrefixIndex:
    """An index over N = `num_blocks` blocks that holds nothing."""
    capacity = 1 << (4 * num_blocks - 1).bit_length()

    def per_block(value: int, *shape: int, dtype=jnp.int32) -> jax.Array:
        return jnp.full((num_blocks, *shape), value, dtype)

    return PrefixIndex(
        table=jnp.full(capacity, -1, jnp.int32),
        slot=per_block(-1),
        hashes=per_block(0, 2, dtype=jnp.uint32),
        tokens=per_block(0, block_size),
        salt=per_block(0),
        parent=per_block(-1),
        depth=per_block(0),
        last_used=per_block(0, dtype=jnp.uint32),
        clock=jnp.uint32(0),
        counts=jnp.zeros((3, 2), jnp.uint32),
    )


def prefix_hashes(tokens: jax.Array, salt: jax.Array, block_size: int) -> jax.Array:
    """uint32 [B, M, 2]: hash of the salt and all tokens of each prefix of whole blocks.

    Sums of mixed (token, position, salt) words: first within blocks, then over the blocks before.

    Args:
      tokens: int32 [B, T]; M = T // P.
      salt: int32 [B].
      block_size: P.
    """
    num_rows, num_columns = tokens.shape[0], tokens.shape[1] // block_size
    words = tokens[:, : num_columns * block_size].astype(jnp.uint32)
    words = words.reshape(num_rows, num_columns, block_size)
    position = jnp.arange(num_columns * block_size, dtype=jnp.uint32).reshape(words.shape[1:])
    salt = salt.astype(jnp.uint32)[:, None, None]
    sums = []
    for odd in (jnp.uint32(0x9E3779B1), jnp.uint32(0x85EBCA77)):
        mixed = _mix(words * odd ^ _mix(position * odd + _mix(salt + odd)))
        sums.append(jnp.sum(mixed, axis=-1, dtype=jnp.uint32))
    return _mix(jnp.cumsum(jnp.stack(sums, axis=-1), axis=1, dtype=jnp.uint32))


def walk(
    index: PrefixIndex, tokens: jax.Array, hashes: jax.Array, salt: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The held blocks that each row's tokens lead to, from the first block on.

    Args:
      index: the index.
      tokens: int32 [B, T].
      hashes: uint32 [B, M, 2], `prefix_hashes` of them.
      salt: int32 [B].
      limit: int32 [B], the most blocks to find.

    Returns:
      int32 [B, M], the blocks found, -1 beyond them; int32 [B], how many.
    """
    candidates = index.table[_places(index, hashes)]  # [B, M, probes]
    is_same = (candidates >= 0) & jnp.all(
        index.hashes[jnp.maximum(candidates, 0)] == hashes[..., None, :], axis=-1
    )
    nth = jnp.argmax(is_same, axis=-1, keepdims=True)
    blocks = jnp.take_along_axis(jnp.where(is_same, candidates, -1), nth, axis=-1)[..., 0]
    is_hit = is_entry(index, blocks, previous(blocks), tokens, salt)
    found = jnp.minimum(leading(is_hit), limit)
    return jnp.where(
        jnp.arange(blocks.shape[1], dtype=jnp.int32) < found[:, None], blocks, -1
    ), found


def is_entry(
    index: PrefixIndex, blocks: jax.Array, parents: jax.Array, tokens: jax.Array, salt: jax.Array
) -> jax.Array:
    """bool [B, M]: whether the nth of `blocks` [B, M] holds a row's nth P tokens below its parent."""
    num_rows, num_columns = blocks.shape
    block_size = index.block_size
    own = tokens[:, : num_columns * block_size].reshape(num_rows, num_columns, block_size)
    safe = jnp.maximum(blocks, 0)
    is_same = (blocks >= 0) & jnp.all(index.tokens[safe] == own, axis=-1)
    is_same &= (index.parent[safe] == parents) & (index.salt[safe] == salt[:, None])
    # A parent that was not found is -1 as well: only a first block may have none.
    return is_same & ((parents >= 0) | (jnp.arange(num_columns) == 0))


def leading(is_so: jax.Array) -> jax.Array:
    """int32 [B]: how many of the first columns of bool [B, M] are all True."""
    num_columns = is_so.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)
    return jnp.min(jnp.where(is_so, num_columns, column), axis=1, initial=num_columns)


def previous(blocks: jax.Array) -> jax.Array:
    """int32 [B, M]: each column's left neighbour; -1 for the first."""
    return jnp.pad(blocks[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def place(
    index: PrefixIndex, blocks: jax.Array, hashes: jax.Array, contends: jax.Array, looks: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Put blocks into free places of the table; of those with one hash, one is put there.

    Args:
      index: the index; `index.hashes` is that of `blocks` already, where they contend.
      blocks: int32 [B, M].
      hashes: uint32 [B, M, 2].
      contends: bool [B, M], what is to be put into the table, each block once.
      looks: bool [B, M], what only looks for a block of its hash that is put there now.

    Returns:
      The new table; int32 [B, M], the block found under each hash, -1 where there is none; and
      int32 [B, M], its place.
    """
    capacity = index.table.shape[0]
    places = _places(index, hashes)

    def probe(carry):
        table, found, at, nth = carry
        place = places[..., nth]
        is_pending = (contends | looks) & (found < 0)
        takes = is_pending & contends & (table[place] < 0)
        # Where several want one free place, the highest block id gets it.
        table = table.at[jnp.where(takes, place, capacity)].max(blocks, mode="drop")
        there = table[place]
        is_same = jnp.all(index.hashes[jnp.maximum(there, 0)] == hashes, axis=-1)
        is_same &= is_pending & (there >= 0)
        return table, jnp.where(is_same, there, found), jnp.where(is_same, place, at), nth + 1

    def goes_on(carry):
        _, found, _, nth = carry
        return (nth < PROBES) & jnp.any((contends | looks) & (found < 0))

    nowhere = jnp.full(blocks.shape, -1, jnp.int32)
    table, found, at, _ = jax.lax.while_loop(
        goes_on, probe, (index.table, nowhere, nowhere, jnp.int32(0))
    )
    return table, found, at


def drop_orphans(
    table: jax.Array, slot: jax.Array, parent: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Take those of `blocks`, any shape, out of the table whose parents are no longer in it.

    Args:
      table, slot, parent: of the index.
      blocks: int32, those to look at; any that is held may stand more than once.

    Returns:
      The new table and slot.
    """
    safe = jnp.clip(blocks, 0, slot.shape[0] - 1)

    def orphans(slot):
        above = parent[safe]
        return (blocks >= 0) & (slot[safe] >= 0) & (above >= 0) & (slot[jnp.maximum(above, 0)] < 0)

    def drop(carry):
        table, slot, is_orphan = carry
        place = jnp.where(is_orphan, slot[safe], table.shape[0])
        table = table.at[place].set(-1, mode="drop")
        slot = slot.at[jnp.where(is_orphan, safe, slot.shape[0])].set(-1, mode="drop")
        return table, slot, orphans(slot)

    table, slot, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), drop, (table, slot, orphans(slot))
    )
    return table, slot


def count(counts: jax.Array, *added: jax.Array) -> jax.Array:
    """64-bit counters `counts` [len(added), 2], (low, high), with int32 amounts added to each."""
    low, high = counts[:, 0], counts[:, 1]
    new_low = low + jnp.stack(added).astype(jnp.uint32)
    return jnp.stack([new_low, high + (new_low < low).astype(jnp.uint32)], axis=1)


def _places(index: PrefixIndex, hashes: jax.Array) -> jax.Array:
    """int32 [..., PROBES]: the places where a hash may stand, in the order they are tried."""
    nth = jnp.arange(PROBES, dtype=jnp.uint32)
    start, stride = hashes[..., 0, None], hashes[..., 1, None] | jnp.uint32(1)
    return ((start + nth * stride) & jnp.uint32(index.table.shape[0] - 1)).astype(jnp.int32)


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the input moves about half of the output's."""
    for shift, odd in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * jnp.uint32(odd)
    return word ^ (word >> 16)
