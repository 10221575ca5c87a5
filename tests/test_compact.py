"""resize and compact: one test for each named behaviour."""

import jax
import numpy as np
import pytest
from token_pool import TokenWorld, config, ids

import paged_kv_jax as pkv


def scattered() -> tuple[TokenWorld, dict[int, list[int | None]]]:
    """Four sequences of which two are gone, one forked, and one partly behind a window."""
    world = TokenWorld()
    world.extend(s0=9, s1=7, s2=10, s3=8)
    world.state, _, copies = pkv.fork(world.state, ids(2), ids(4))
    world.copy(copies)
    world.state, _ = pkv.free(world.state, ids(0, 3))
    world.state, _ = pkv.release_before(world.state, ids(4), ids(5))
    return world, {seq: world.read(seq) for seq in (1, 2, 4)}


@pytest.mark.parametrize("num_blocks", [6, 7, 16, 40])
def test_sequences_keep_their_tokens_in_a_pool_of_another_size(num_blocks: int):
    world, texts = scattered()
    used = 16 - int(world.state.free_top)
    assert used == 6
    world.state, world.pool, index = pkv.resize(world.state, world.pool, num_blocks)
    assert index is None
    assert world.pool.num_blocks == world.state.num_blocks == num_blocks
    assert int(world.state.free_top) == num_blocks - used
    assert np.flatnonzero(np.asarray(world.state.ref_count)).tolist() == list(range(used))
    for seq, tokens in texts.items():
        assert world.read(seq) == tokens
    world.check()
    state, result = pkv.allocate(world.state, ids(0), 4 * min(6, num_blocks - used))
    assert result.tolist() == [min(6, num_blocks - used)]
    assert pkv.check_invariants(state) == []


def test_a_pool_too_small_for_what_is_in_use_is_refused():
    world, _ = scattered()
    with pytest.raises(ValueError, match=r"num_blocks=5 is too small: 6 blocks are in use"):
        pkv.resize(world.state, world.pool, 5)
    with pytest.raises(ValueError, match="num_blocks=0"):
        pkv.resize(pkv.init(config()), world.pool, 0)


def test_compact_keeps_the_size_and_compiles_within_a_step():
    world, texts = scattered()
    world.state, world.pool, _ = jax.jit(pkv.compact)(world.state, world.pool)
    assert np.flatnonzero(np.asarray(world.state.ref_count)).tolist() == list(range(6))
    for seq, tokens in texts.items():
        assert world.read(seq) == tokens
    world.check()


@pytest.mark.parametrize("num_blocks", [5, 16, 70])
def test_an_index_finds_the_same_prefixes_in_a_pool_of_another_size(num_blocks: int):
    world, index = TokenWorld(), pkv.init_prefix_index(config())
    first, second = world.extend(s0=9, s1=8).values()
    tokens = np.zeros((2, 12), np.int32)
    tokens[0, :9], tokens[1, :8] = first, second
    index, state, _ = pkv.commit(index, world.state, ids(0, 1), tokens, ids(9, 8))
    state, _ = pkv.free(state, ids(0))
    state, world.pool, index = pkv.resize(state, world.pool, num_blocks, index)
    assert index is not None
    assert pkv.check_index(index, state) == []
    blocks, found = pkv.match_prefix(index, tokens, ids(9, 9))
    assert found.tolist() == [8, 8]
    keys = np.asarray(world.pool.k)[0, np.asarray(blocks)[:, :2], :, 0, 0].reshape(2, 8)
    assert keys.astype(int).tolist() == tokens[:, :8].tolist()
    index, state, count = pkv.evict(index, state, num_blocks)
    assert int(count) == 2
    assert pkv.check_index(index, state) == []
