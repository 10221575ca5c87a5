"""A pool whose "keys" are the tokens themselves, so that what a sequence would attend to can be read.

`TokenWorld` steps a state and such a pool together, and `read` follows a sequence's table through the
pool: whatever shares, copies, moves or swaps blocks must leave every sequence reading its own tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv


def config(num_blocks=16, block_size=4, max_seqs=6, max_blocks_per_seq=6) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=2, num_kv_heads=1, head_dim=1, num_blocks=num_blocks, block_size=block_size,
        max_seqs=max_seqs, max_blocks_per_seq=max_blocks_per_seq, dtype="float32",
    )  # fmt: skip


def ids(*values: int) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


@functools.partial(jax.jit, static_argnames="num_tokens")
def write_tokens(state, pool, seq_ids, counts, result, values, num_tokens):
    plan = pkv.make_plan(state, seq_ids, counts, result, num_tokens=num_tokens)
    values = values[:, None, None]
    for layer in range(pool.k.shape[0]):
        pool = pkv.write(pool, layer, values + 1000 * layer, -values - 1000 * layer, plan)
    return pool


copy_blocks = jax.jit(pkv.copy_blocks)
allocate = jax.jit(pkv.allocate)


class TokenWorld:
    """A state, its pool of tokens, and a clock of distinct token values."""

    def __init__(self, geometry: pkv.KVCacheConfig | None = None):
        self.config = geometry or config()
        self.state, self.pool = pkv.init(self.config), pkv.init_pool(self.config)
        self.clock = 0

    def new_tokens(self, count: int) -> list[int]:
        self.clock += count
        return list(range(self.clock - count + 1, self.clock + 1))

    def extend(self, **counts: int) -> dict[str, list[int]]:
        """Give sequences new tokens, `extend(s0=5, s2=1)`; what each got."""
        names = list(counts)
        given = {name: self.new_tokens(counts[name]) for name in names}
        seq_ids = ids(*(int(name[1:]) for name in names))
        self.state, result = allocate(self.state, seq_ids, ids(*counts.values()))
        assert np.all(np.asarray(result) >= 0), result
        self.fill(
            seq_ids,
            ids(*counts.values()),
            result,
            [token for row in given.values() for token in row],
        )
        return given

    def fill(self, seq_ids, counts, result, values: list[int], room: int = 64) -> None:
        """Write the tokens of rows that an allocate or append has just made room for."""
        padded = np.zeros(room, np.float32)
        padded[: len(values)] = values
        self.pool = write_tokens(
            self.state, self.pool, seq_ids, counts, result, jnp.asarray(padded), num_tokens=room
        )

    def copy(self, copies: pkv.BlockCopies) -> None:
        self.pool = copy_blocks(self.pool, copies.src, copies.dst)

    def read(self, seq_id: int) -> list[int | None]:
        """The tokens of a sequence as its table finds them in both pools of every layer; None where
        the table has no block."""
        return read(self.state, self.pool, seq_id)

    def check(self) -> None:
        assert pkv.check_invariants(self.state) == []


def read(state: pkv.BlockState, pool: pkv.KVPool, seq_id: int) -> list[int | None]:
    table, length = np.asarray(state.block_table)[seq_id], int(np.asarray(state.seq_lens)[seq_id])
    k, v = np.asarray(pool.k)[..., 0, 0], np.asarray(pool.v)[..., 0, 0]  # [L, N, P]
    position = np.arange(length)
    block, offset = table[position // state.block_size], position % state.block_size
    is_there = block >= 0
    keys, values = (side[:, np.maximum(block, 0), offset][:, is_there] for side in (k, v))
    for layer, of_layer in enumerate(keys):
        np.testing.assert_array_equal(of_layer, keys[0] + 1000 * layer)
    np.testing.assert_array_equal(values, -keys)
    tokens = np.full(length, None)
    tokens[is_there] = keys[0].astype(int)
    return tokens.tolist()
