"""`PagedKVCache`: its methods are the functions, it is a pytree, and it shows itself."""

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_kv_jax as pkv

CONFIG = pkv.KVCacheConfig(
    num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=10, block_size=4, max_seqs=3,
    max_blocks_per_seq=5, dtype="float32",
)  # fmt: skip


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def test_methods_are_the_functions():
    cache = pkv.PagedKVCache.create(CONFIG)
    state, pool = pkv.init(CONFIG), pkv.init_pool(CONFIG)

    # Prefill: allocate and plan.
    rows, counts = ids(2, 0), ids(6, 3)
    cache, result = cache.allocate(rows, counts, max_new_tokens=6)
    state, expected_result = pkv.allocate(state, rows, counts, max_new_tokens=6)
    assert_same(result, expected_result)
    cache, plan = cache.plan(rows, counts, result, num_tokens=10, max_query_len=6)
    expected_plan = pkv.make_plan(state, rows, counts, result, num_tokens=10, max_query_len=6)
    assert_same(plan, expected_plan)
    k, v, q = normal(0, 10, 2, 8), normal(1, 10, 2, 8), normal(2, 10, 4, 8)
    cache = cache.write(1, k, v, plan)
    pool = pkv.write(pool, 1, k, v, plan)
    out, lse = cache.attend(q, 1, plan, scale=0.5, return_lse=True)
    expected = pkv.paged_attention(q, pool, 1, plan, scale=0.5, return_lse=True)
    assert_same((out, lse), expected)

    # Decode: step.
    cache, plan, result = cache.step(rows)
    state, expected_result = pkv.append(state, rows, 1)
    assert_same(result, expected_result)
    assert_same(plan, pkv.make_plan(state, rows, 1, result))

    # Append, copy, free.
    cache, result = cache.append(ids(0, 1), 2)
    state, expected_result = pkv.append(state, ids(0, 1), 2)
    assert_same(result, expected_result)
    cache = cache.copy_blocks(ids(0), ids(7))
    pool = pkv.copy_blocks(pool, ids(0), ids(7))
    cache, result = cache.free(ids(2, 2))
    state, expected_result = pkv.free(state, ids(2, 2))
    assert_same(result, expected_result)
    assert_same(cache, pkv.PagedKVCache(config=CONFIG, state=state, pool=pool))
    assert_same(cache.errors, state.errors)


def test_a_ragged_step_appends_and_plans():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(0, 1), ids(3, 5))
    cache, plan, result = cache.step(ids(1, 0), ids(2, 4), num_tokens=8, max_query_len=4)
    assert result.tolist() == [0, 1]
    assert plan.kv_lens.tolist() == [7, 7]
    assert plan.cu_q_lens.tolist() == [0, 2, 6]


def test_a_step_never_grows_a_row_beyond_what_a_plan_can_hold():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(0, 1), ids(3, 5))
    after, plan, result = cache.step(ids(0, 1), ids(5, 1), num_tokens=8, max_query_len=4)
    assert result.tolist() == [-5, 0]
    assert after.state.seq_lens.tolist() == [3, 6, 0]
    assert plan.cu_q_lens.tolist() == [0, 0, 1]


def test_what_a_plan_leaves_out_joins_the_caches_sticky_word():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(0, 1), ids(3, 5))
    cache, _, _ = cache.step(ids(0, 1), ids(3, 3), num_tokens=4)
    with pytest.raises(pkv.PagedKVError, match="PLAN_OVERFLOW"):
        pkv.raise_if_failed(cache)


def test_methods_leave_self_as_it_was():
    cache = pkv.PagedKVCache.create(CONFIG)
    before = jax.tree.map(np.array, cache)
    other, result = cache.allocate(ids(0), 9)
    other, plan = other.plan(ids(0), 9, result)
    other.write(0, jnp.ones((9, 2, 8)), jnp.ones((9, 2, 8)), plan).free(ids(0))
    assert_same(before, cache)


def test_a_cache_is_a_pytree_whose_config_is_static():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(1), 7)
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 9
    assert_same(jax.tree.unflatten(structure, leaves), cache)
    assert structure == jax.tree.structure(pkv.PagedKVCache.create(CONFIG))


def decode(cache: pkv.PagedKVCache, q: jax.Array):
    cache, plan, _ = cache.step(ids(0, 2))
    for layer in range(2):
        cache = cache.write(layer, q[:, :2], q[:, 2:], plan)
    return cache, cache.attend(q, 1, plan)


def test_a_cache_passes_through_jit_and_scan():
    start, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(0, 2), ids(3, 1))
    steps = normal(3, 5, 2, 4, 8)
    looped, outs = jax.jit(lambda cache, q: jax.lax.scan(decode, cache, q))(start, steps)
    cache, step = start, jax.jit(decode)
    for q, out in zip(steps, outs, strict=True):
        cache, expected = step(cache, q)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert_same(looped, cache)


def test_repr_says_what_is_used_by_whom_and_how_full():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(2, 0), ids(6, 3))
    cache, _ = cache.append(ids(1), 1)
    assert repr(cache).splitlines() == [
        "PagedKVCache(2 layers, 10 blocks of 4 tokens, 2 kv heads x 8, float32, 0.0 MiB)",
        "  3 of 10 blocks used (30 %) by 2 sequences with 9 tokens; 3 slots in tails",
        "  sequence 0: 3 tokens in 1 blocks",
        "  sequence 2: 6 tokens in 2 blocks",
        "  failed: INVALID_SEQ",
    ]


class Markup(html.parser.HTMLParser):
    """The text of some HTML, and whether its tags are balanced."""

    def __init__(self, markup: str):
        super().__init__()
        self.open, self.text = [], []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_html_shows_the_same_as_repr_and_a_bar():
    cache, _ = pkv.PagedKVCache.create(CONFIG).allocate(ids(2, 0), ids(6, 3))
    markup = cache._repr_html_()
    parsed = Markup(markup)
    assert parsed.open == []
    text = " ".join(parsed.text)
    for line in repr(cache).splitlines()[1:]:
        assert line.strip() in text
    assert "width:30.0%" in markup


def test_long_lists_of_sequences_are_cut_short():
    config = pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=20, block_size=1, max_seqs=20,
        max_blocks_per_seq=1,
    )  # fmt: skip
    cache, _ = pkv.PagedKVCache.create(config).allocate(jnp.arange(20, dtype=jnp.int32), 1)
    assert repr(cache).splitlines()[-1] == "  and 12 more"


def test_caches_that_hold_no_readable_values_still_show_their_geometry():
    head = repr(pkv.PagedKVCache.create(CONFIG)).splitlines()[0]
    seen = []

    @jax.jit
    def traced(cache):
        seen.extend([repr(cache), cache._repr_html_()])
        return cache.errors

    cache = pkv.PagedKVCache.create(CONFIG)
    traced(cache)
    seen.append(repr(jax.eval_shape(lambda: pkv.PagedKVCache.create(CONFIG))))
    seen.append(repr(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), cache)))
    jax.tree.map(lambda leaf: leaf.delete(), cache)
    seen.append(repr(cache))
    assert [text for text in seen if not text.startswith("<b>")] == [head] * 4
    assert Markup(seen[1]).open == []
