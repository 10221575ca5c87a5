"""`PagedKVCache` with sharing and prefix reuse: what composes inside one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_pool import config, ids, read

import paged_kv_jax as pkv

PROMPT_ROOM = 24


def write_tokens(cache, plan, tokens):
    """Write tokens [T] as token_pool reads them."""
    values = tokens.astype(jnp.float32)[:, None, None]
    for layer in range(cache.config.num_layers):
        cache = cache.write(layer, values + 1000 * layer, -values - 1000 * layer, plan)
    return cache


@jax.jit
def start(cache, seq_ids, tokens, lens):
    """Admit, prefill what is not found, commit."""
    cache, result, found = cache.admit(seq_ids, tokens, lens)
    cache, plan = cache.plan(seq_ids, lens - found, result, num_tokens=2 * PROMPT_ROOM)
    rest = tokens[jnp.maximum(plan.token_rows, 0), plan.positions]
    cache = write_tokens(cache, plan, rest)
    cache, _ = cache.commit(jnp.where(result >= 0, seq_ids, -1), tokens, lens)
    return cache, result, found


@jax.jit
def decode(cache, seq_ids, tokens):
    """Append tokens [steps, B] one step after another."""

    def step(cache, tokens):
        cache, plan, result = cache.step(seq_ids, 1)
        return write_tokens(cache, plan, tokens), result

    return jax.lax.scan(step, cache, tokens)


free = jax.jit(lambda cache, seq_ids: cache.free(seq_ids)[0])


def prompts(*texts: list[int]):
    tokens = np.zeros((2, PROMPT_ROOM), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return jnp.asarray(tokens), ids(*([len(text) for text in texts] + [0])[:2])


def check(cache) -> None:
    assert pkv.check_index(cache.index, cache.state) == []
    pkv.raise_if_failed(cache)


def test_requests_share_a_system_prompt_and_decode_evicts_what_nobody_uses():
    system = list(range(100, 108))
    cache = pkv.PagedKVCache.create(config(num_blocks=9), prefix_reuse=True)
    cache, _, found = start(cache, ids(0, 1), *prompts([*system, 1], [*system, 2]))
    assert found.tolist() == [0, 0]  # both came at once
    cache = free(cache, ids(0, 1))
    cache, result, found = start(cache, ids(2, 3), *prompts([*system, 3], [*system, 4]))
    assert (result.tolist(), found.tolist()) == ([1, 1], [8, 8])
    check(cache)
    cache = free(cache, ids(3))
    unused = list(range(200, 208))
    cache, _, _ = start(cache, ids(4, -1), *prompts([*unused, 5], []))
    cache = free(cache, ids(4))
    assert pkv.match_prefix(cache.index, *prompts([*unused, 6], []))[1].tolist() == [8, 0]
    tokens = jnp.arange(11 * 2, dtype=jnp.int32).reshape(11, 2)
    cache, _, _ = start(cache, ids(5, -1), *prompts([*system, 7], []))
    cache, result = decode(cache, ids(2, 5), tokens)  # 4 blocks more, of which 3 are free
    assert np.all(np.asarray(result) >= 0)
    assert pkv.match_prefix(cache.index, *prompts([*unused, 6], []))[1].tolist() == [4, 0]
    for seq, last, column in ((2, 3, 0), (5, 7, 1)):
        assert read(cache.state, cache.pool, seq) == [*system, last, *tokens[:, column].tolist()]
    check(cache)


def test_fork_and_truncate_perform_their_copies():
    cache = pkv.PagedKVCache.create(config())
    cache, result = cache.allocate(ids(0), ids(6))
    cache, plan = cache.plan(ids(0), ids(6), result, num_tokens=6)
    cache = write_tokens(cache, plan, jnp.arange(1, 7))
    cache, result = jax.jit(lambda cache: cache.fork(ids(0, 0), ids(1, 2)))(cache)
    assert result.tolist() == [1, 1]
    cache, result = jax.jit(lambda cache: cache.truncate(ids(1, 2), ids(3, 5)))(cache)
    assert result.tolist() == [1, 0]
    cache, _ = decode(cache, ids(0, 1), jnp.array([[9, 8]], jnp.int32))
    assert [read(cache.state, cache.pool, seq) for seq in (0, 1, 2)] == [
        [1, 2, 3, 4, 5, 6, 9],
        [1, 2, 3, 8],
        [1, 2, 3, 4, 5],
    ]
    cache, result = cache.release_before(ids(0), ids(4))
    assert result.tolist() == [0]  # another fork has the block
    assert pkv.check_invariants(cache.state) == []


def test_a_resized_cache_says_so_and_keeps_its_index():
    cache = pkv.PagedKVCache.create(config(), prefix_reuse=True)
    text = list(range(50, 59))
    cache, _, _ = start(cache, ids(0, -1), *prompts(text, []))
    cache = cache.resize(5)
    assert (cache.config.num_blocks, cache.pool.num_blocks) == (5, 5)
    assert read(cache.state, cache.pool, 0) == text
    check(cache)
    cache = cache.compact()
    assert pkv.match_prefix(cache.index, *prompts(text, []))[1].tolist() == [8, 0]
    cache = cache.forget()
    assert pkv.match_prefix(cache.index, *prompts(text, []))[1].tolist() == [0, 0]
    check(cache)


def test_prefix_methods_without_an_index_say_what_is_missing():
    cache = pkv.PagedKVCache.create(config())
    for name in ("admit", "commit"):
        with pytest.raises(ValueError, match=f"{name} needs a prefix index"):
            getattr(cache, name)(ids(0, 1), *prompts([1], [2]))


def test_a_fork_with_its_copies_makes_no_copy_of_the_pool():
    geometry = pkv.KVCacheConfig(
        num_layers=2, num_kv_heads=2, head_dim=32, num_blocks=512, block_size=8, max_seqs=8,
        max_blocks_per_seq=8, dtype="float32",
    )  # fmt: skip
    cache = jax.eval_shape(lambda: pkv.PagedKVCache.create(geometry))

    def beams(cache):
        def step(cache, _):
            cache, _ = cache.fork(ids(0, 1), ids(2, 3))
            cache, _ = cache.free(ids(0, 1))
            cache, _ = cache.fork(ids(2, 3), ids(0, 1))
            cache, _ = cache.truncate(ids(0, 1), ids(3, 5))
            return cache.free(ids(2, 3))[0], None

        return jax.lax.scan(step, cache, length=3)[0]

    compiled = jax.jit(beams, donate_argnums=0).lower(cache).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < geometry.memory_bytes / 8
