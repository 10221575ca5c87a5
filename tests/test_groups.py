"""Layers with and without a sliding window, with a block table for each group."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_pool import ids

import paged_kv_jax as pkv

WINDOW = 6
CONFIG = pkv.KVCacheConfig(
    num_layers=4, num_kv_heads=1, head_dim=8, num_blocks=40, block_size=4, max_seqs=3,
    max_blocks_per_seq=10, dtype="float32",
)  # fmt: skip
GROUPS = (
    pkv.LayerGroup(layers=(0, 2), num_blocks=40),
    pkv.LayerGroup(layers=(1, 3), num_blocks=10, sliding_window=WINDOW),
)


def model(cache, x, plan, window_of):
    """Four layers that mix what they attend to: any wrong key changes everything after it."""
    for layer in range(CONFIG.num_layers):
        cache = cache.write(layer, x[:, :1], x[:, 1:], plan)
        x = x + cache.attend(x, layer, plan, **window_of(layer))
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return cache, x


def test_window_layers_give_blocks_back_and_the_model_computes_the_same_bits():
    steps = jnp.asarray(np.random.default_rng(0).standard_normal((30, 3, 2, 8), np.float32))
    rows = ids(0, 2, -1)

    @jax.jit
    def plain(cache):
        def step(cache, x):
            cache, plan, _ = cache.step(rows, 1)
            return model(cache, x, plan, lambda i: {"sliding_window": WINDOW if i % 2 else None})

        return jax.lax.scan(step, cache.allocate(rows, ids(1, 3, 0))[0], steps)

    @jax.jit
    def grouped(cache):
        def step(cache, x):
            cache, plans, result = cache.step(rows, 1)
            cache, x = model(cache, x, plans, lambda _: {})
            return cache, (x, result, cache.caches[1].state.free_top)

        return jax.lax.scan(step, cache.allocate(rows, ids(1, 3, 0))[0], steps)

    _, expected = plain(pkv.PagedKVCache.create(CONFIG))
    cache, (out, result, free_top) = grouped(pkv.GroupedKVCache.create(CONFIG, GROUPS))
    np.testing.assert_array_equal(out[:, :2], expected[:, :2])
    assert np.all(np.asarray(result) >= 0)
    assert np.min(np.asarray(free_top)) >= 10 - 2 * 3  # never more than three blocks each
    assert cache.seq_lens.tolist() == [31, 0, 33]
    assert [int(40 - cache.caches[0].state.free_top), int(10 - cache.caches[1].state.free_top)] == [
        8 + 9, 2 + 3,
    ]  # fmt: skip
    for each in cache.caches:
        assert pkv.check_invariants(each.state) == []
    pkv.raise_if_failed(cache)
    cache, _ = cache.free(ids(0, 2))
    assert [int(each.state.free_top) for each in cache.caches] == [40, 10]


def test_a_row_that_fails_in_one_group_is_undone_in_the_others():
    small = (GROUPS[0], dataclasses.replace(GROUPS[1], num_blocks=3))
    cache, result = pkv.GroupedKVCache.create(CONFIG, small).allocate(ids(0, 1), ids(8, 8))
    assert result.tolist() == [2, -1]
    assert [each.state.seq_lens.tolist() for each in cache.caches] == [[8, 0, 0]] * 2
    cache, _ = cache.allocate(ids(1), ids(4))
    cache, plans, result = cache.step(ids(0, 1), ids(1, 1), num_tokens=2)
    # Sequence 0 gave nothing back yet (its next query sees keys 3 to 8), so neither finds a block.
    assert result.tolist() == [-1, -1]
    assert [each.state.seq_lens.tolist() for each in cache.caches] == [[8, 4, 0]] * 2
    assert [plan.kv_lens.tolist() for plan in plans] == [[0, 0]] * 2
    for each in cache.caches:
        assert pkv.check_invariants(each.state) == []


def test_a_speculative_step_rolls_back_in_every_group():
    cache, _ = pkv.GroupedKVCache.create(CONFIG, GROUPS).allocate(ids(0), ids(13))
    cache, _, _ = cache.step(ids(0), 5)
    before = cache
    cache, result = cache.truncate(ids(0), ids(14))
    assert result.tolist() == [1]
    assert [int(each.state.seq_lens[0]) for each in cache.caches] == [14, 14]
    _, result = before.truncate(ids(0), ids(6))  # the window has moved on
    assert result.tolist() == [-5]
    for each in cache.caches:
        assert pkv.check_invariants(each.state) == []


def test_groups_that_do_not_cover_the_layers_raise():
    with pytest.raises(ValueError, match=r"the groups hold layers \[0, 1, 2\]"):
        pkv.GroupedKVCache.create(CONFIG, (pkv.LayerGroup(layers=(0, 1, 2), num_blocks=4),))
    with pytest.raises(ValueError, match="sliding_window=0"):
        pkv.LayerGroup(layers=(0,), num_blocks=4, sliding_window=0)
    cache = pkv.GroupedKVCache.create(CONFIG, GROUPS)
    with pytest.raises(ValueError, match="layer=4"):
        cache.attend(jnp.zeros((1, 1, 8)), 4, ())
