"""Shared prefixes: which rows share what, and attention that reads it once, against the oracle."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import paged_kv_jax as pkv
from paged_kv_jax import dispatch
from paged_kv_jax.cascade import MIN_SHARED_TOKENS, find_shared_prefix

P = 32  # so that the shortest prefix worth sharing is 4 blocks
find = jax.jit(functools.partial(find_shared_prefix, block_size=P))


ROWS, TOKENS, BLOCKS_PER_ROW, MAX_QUERY_LEN = 8, 36, 14, 4


def make(q_lens, kv_lens, parents=None, seed: int = 0, **changes) -> oracle.Case:
    """A batch in which row r begins with the first n blocks of row p, for each `parents[r] = (p, n)`.

    All have the same shapes, and so share one program.
    """
    idle = [0] * (ROWS - len(q_lens))
    arguments = dict(
        head_dim=8, num_heads=2, num_kv_heads=1, block_size=P, num_layers=1, layer=0,
        max_blocks=BLOCKS_PER_ROW, num_tokens=TOKENS,
        spare_blocks=ROWS * BLOCKS_PER_ROW - sum(-(-kv_len // P) for kv_len in kv_lens),
    )  # fmt: skip
    case = oracle.make_case(
        np.random.default_rng(seed), q_lens=[*q_lens, *idle], kv_lens=[*kv_lens, *idle],
        **{**arguments, **changes},
    )  # fmt: skip
    for row, (parent, count) in (parents or {}).items():
        case.block_table[row, :count] = case.block_table[parent, :count]
    return case


def cascade_plan(case: oracle.Case) -> pkv.Plan:
    plan = dataclasses.replace(case.plan(), max_query_len=MAX_QUERY_LEN)
    found = find(plan.block_table, plan.kv_lens, plan.cu_q_lens)
    return dataclasses.replace(plan, shared_prefix=found)


@functools.cache
def attend(implementation: str, **options):
    @jax.jit
    def run(q, pool, layer, plan, arrays):
        return pkv.paged_attention(
            q, pool, layer, plan, implementation=implementation, return_lse=True, **options,
            **arrays,
        )  # fmt: skip

    return run


def run(case: oracle.Case, implementation: str = "xla", **options):
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    attention = attend(implementation, **static)
    plan, layer = cascade_plan(case), jnp.int32(case.layer)
    out, lse = attention(jnp.asarray(case.q), case.pool, layer, plan, arrays)
    return np.asarray(out), np.asarray(lse)


def assert_right(case: oracle.Case, implementation: str = "xla", **options) -> None:
    out, lse = run(case, implementation, **options)
    exact, exact_lse = oracle.attention(case, **options)
    np.testing.assert_allclose(out, exact, rtol=4e-6, atol=4e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-5)


def groups_of(case: oracle.Case) -> list[tuple[list[int], int]]:
    """(rows, shared tokens) of each group that shares something, by comparing row after row."""
    rows = [row for row, kv_len in enumerate(case.kv_lens) if kv_len > 0]

    def common(row: int, other: int) -> int:
        blocks = 0
        for a, b in zip(case.block_table[row], case.block_table[other], strict=True):
            seen_by_all = min(case.kv_lens[r] - case.q_lens[r] for r in (row, other))
            if a != b or a < 0 or (blocks + 1) * P > seen_by_all:
                break
            blocks += 1
        return blocks * P

    with_next = [common(a, b) for a, b in itertools.pairwise(rows)]
    groups = []
    for i, row in enumerate(rows):
        shared = with_next[i - 1] if i else 0
        beside = max(with_next[i - 2] if i > 1 else 0, with_next[i] if i < len(with_next) else 0)
        if i and shared >= MIN_SHARED_TOKENS and 2 * shared >= beside:
            groups[-1] = ([*groups[-1][0], row], min(groups[-1][1], shared))
        else:
            groups.append(([row], 10**9))
    return [(rows, shared) for rows, shared in groups if len(rows) > 1]


def assert_groups(case: oracle.Case) -> list[tuple[list[int], int]]:
    """What `find_shared_prefix` found is what `groups_of` says; returns it."""
    found = jax.tree.map(
        np.asarray, find(*map(jnp.asarray, (case.block_table, case.kv_lens, case.cu_q_lens)))
    )
    expected = groups_of(case)
    own = case.kv_lens.copy()
    for rows, shared in expected:
        own[rows] -= shared
        [group] = np.flatnonzero(
            (found.cu_q_lens[:-1] <= case.cu_q_lens[rows[0]])
            & (found.cu_q_lens[1:] > case.cu_q_lens[rows[0]])
        )
        assert found.kv_lens[group] == shared
        assert found.cu_q_lens[group + 1] >= case.cu_q_lens[rows[-1] + 1]
        blocks = case.block_table[rows[0], : shared // P]
        np.testing.assert_array_equal(found.block_table[group, : shared // P], blocks)
    assert np.count_nonzero(found.kv_lens) == len(expected)
    # Rows that stand alone are lumped together, between groups that share something.
    assert np.count_nonzero(np.diff(found.cu_q_lens)) <= 2 * len(expected)
    assert found.cu_q_lens[0] == 0
    last = expected[-1][0][-1] if expected else -1
    assert case.cu_q_lens[last + 1] <= found.cu_q_lens[-1] <= case.cu_q_lens[-1]
    assert np.all(np.diff(found.cu_q_lens) >= 0)
    np.testing.assert_array_equal(found.own_kv_lens, own)
    width = case.block_table.shape[1]
    for row, start in enumerate((case.kv_lens - own) // P):
        np.testing.assert_array_equal(
            found.own_block_table[row],
            np.append(case.block_table[row, start:], np.full(width, -1))[:width],
        )
    return expected


def random_case(seed: int) -> oracle.Case:
    """Eight rows of which some follow another's blocks, for a while or nearly to the end."""
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(1, 13 * P, ROWS)
    q_lens = np.minimum(rng.integers(1, MAX_QUERY_LEN + 1, ROWS), kv_lens)
    takes_part = rng.random(ROWS) < 0.8
    kv_lens, q_lens = kv_lens * takes_part, q_lens * takes_part
    parents = {}
    for last, row in itertools.pairwise(np.flatnonzero(takes_part)):
        if rng.random() < 0.8:
            most = int(min(-(-kv_lens[row] // P), -(-kv_lens[last] // P)))
            parents[row] = last, most if rng.random() < 0.5 else int(rng.integers(0, most + 1))
    return make(q_lens.tolist(), kv_lens.tolist(), parents, seed)


def test_groups_and_attention_of_random_batches():
    found = []
    for seed in range(24):
        case = random_case(seed)
        found += assert_groups(case)
        assert_right(case)
    assert len(found) > 20
    assert {len(rows) for rows, _ in found} >= {2, 3}


def test_the_reference_agrees_on_random_batches():
    for seed in range(100, 103):
        assert_right(random_case(seed), "reference")


FULL = 6 * P
EDGES = {
    # name: (q_lens, kv_lens, parents, groups)
    "nothing shared": ([1, 1, 1], [200, 200, 200], {}, []),
    "all but the last token": (
        [1, 1, 1], [FULL + 1] * 3, {1: (0, 6), 2: (0, 6)}, [([0, 1, 2], FULL)],
    ),
    "the query's own block is not shared": (
        [1, 1], [FULL, FULL], {1: (0, 6)}, [([0, 1], FULL - P)],
    ),
    "only what every query sees": (
        [4, 1], [FULL + 3, FULL + 3], {1: (0, 6)}, [([0, 1], FULL - P)],
    ),
    "too short to be worth it": ([1, 1], [FULL] * 2, {1: (0, 3)}, []),
    "just worth it": ([1, 1], [FULL] * 2, {1: (0, 4)}, [([0, 1], 4 * P)]),
    "a row that takes no part, between": (
        [1, 0, 1], [FULL, 0, FULL], {2: (0, 5)}, [([0, 2], 5 * P)],
    ),
    "samples of two prompts": (
        [1] * 5, [400, 390, 300, 320, 310], {1: (0, 11), 3: (2, 9), 4: (2, 9)},
        [([0, 1], 11 * P), ([2, 3, 4], 9 * P)],
    ),
    "prompts that begin alike": (
        [1] * 4, [400] * 4, {1: (0, 12), 2: (0, 5), 3: (2, 12)}, [([0, 1], 12 * P), ([2, 3], 12 * P)],
    ),
    "one stands apart": (
        [1] * 5, [300] * 5, {1: (0, 9), 4: (3, 8)}, [([0, 1], 9 * P), ([3, 4], 8 * P)],
    ),
    "behind some that stand alone": ([1] * 5, [300] * 5, {4: (3, 8)}, [([3, 4], 8 * P)]),
    "a single row": ([4], [FULL], {}, []),
    "nobody": ([0, 0], [0, 0], {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_who_shares_what(name: str):
    q_lens, kv_lens, parents, groups = EDGES[name]
    case = make(q_lens, kv_lens, parents)
    assert assert_groups(case) == groups
    if not groups:  # then nothing is done for them
        assert not np.any(find(*case.raw[4:]).cu_q_lens)


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_places_of_rows_that_take_no_part_yield_nothing(idle: int):
    case = make([1, 1, 1], [FULL, FULL, FULL], {1: (0, 5), 2: (0, 5)})
    case.kv_lens[idle] = 0  # it keeps its place, as in decode
    assert assert_groups(case) == [([row for row in range(3) if row != idle], 5 * P)]
    out, lse = run(case)
    np.testing.assert_array_equal(out[idle], 0)
    np.testing.assert_array_equal(lse[idle], -np.inf)
    assert_right(case)


def test_blocks_that_were_released_are_not_shared():
    case = make([1, 1], [300, 300], {1: (0, 9)})
    case.block_table[:2, 0] = -1
    assert assert_groups(case) == []


SHARING = dict(
    q_lens=[2, 1, 3, 1], kv_lens=[250, 222, 0, 260], parents={1: (0, 6), 3: (1, 6)}
)  # fmt: skip


def test_options_that_the_two_passes_share():
    case = make(**SHARING, seed=1)
    assert groups_of(case)
    options = oracle.random_options(
        np.random.default_rng(2), 2, "scale", "logits_soft_cap", "sinks"
    )
    assert_right(case, "reference", **options)


def test_all_keys_of_a_row_are_seen_without_causality():
    assert_right(make(**SHARING, seed=3), "reference", causal=False)


def test_options_that_reckon_with_distances_attend_row_by_row():
    options = oracle.random_options(np.random.default_rng(5), 2, "sliding_window", "alibi_slopes")
    assert_right(make(**SHARING, seed=4), "reference", **options)


def test_no_unseen_slot_matters():
    case = make(**SHARING, seed=6)
    zeros, nans = (run(case.with_unseen(value)) for value in (0.0, np.nan))
    for a, b in zip(zeros, nans, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rounding():
    case = make(
        [1] * 8, list(range(150, 310, 20)), dict.fromkeys(range(1, 8), (0, 4)), seed=7,
        dtype="bfloat16", head_dim=64,
    )  # fmt: skip
    assert groups_of(case) == [(list(range(8)), 4 * P)]
    oracle.assert_rounds_well(run(case)[0], case)


def test_supports_asks_for_both_passes(monkeypatch):
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 8.0)
    case = make([1, 1], [FULL, FULL], {1: (0, 5)}, num_tokens=2)
    q = jnp.asarray(case.q)
    assert pkv.supports("triton", q, case.pool, case.plan()) == (True, "")
    is_supported, reason = pkv.supports("triton", q, case.pool, cascade_plan(case))
    assert not is_supported
    assert "causal=False" in reason
    assert pkv.supports("xla", q, case.pool, cascade_plan(case)) == (True, "")


def test_plan_from_tables_finds_prefixes_and_is_otherwise_the_same_plan():
    case = make(**{**SHARING, "q_lens": [2, 1, 0, 1]})
    plan = jax.jit(
        lambda table, kv_lens, q_lens: pkv.plan_from_tables(
            table, kv_lens, q_lens, block_size=P, num_tokens=TOKENS, max_query_len=MAX_QUERY_LEN,
            shared_prefix=True,
        )
    )(*map(jnp.asarray, (case.block_table, case.kv_lens, case.q_lens)))  # fmt: skip
    assert plan.shared_prefix.own_kv_lens.tolist()[:4] == [250 - 192, 222 - 192, 0, 260 - 192]
    jax.tree.map(np.testing.assert_array_equal, plan, cascade_plan(case))
    assert case.plan().shared_prefix is None


CONFIG = pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=64, block_size=P, max_seqs=6,
    max_blocks_per_seq=8, dtype="float32",
)  # fmt: skip


def tokens_in(cache: pkv.PagedKVCache, plan: pkv.Plan, seed) -> pkv.PagedKVCache:
    """Random keys and values for the plan's tokens."""
    k, v = jax.random.normal(jax.random.key(seed), (2, plan.num_tokens, 1, 8))
    return cache.write(0, k, v, plan)


@jax.jit
def decode(cache: pkv.PagedKVCache, seq_ids: jax.Array):
    """Three steps in one scan: outputs with and without the cascade, and each row's shared tokens."""

    def step(cache, seed):
        cache, plan, _ = cache.step(seq_ids, 1, shared_prefix=True)
        cache = tokens_in(cache, plan, seed)
        q = jax.random.normal(jax.random.key(seed + 100), (seq_ids.size, 2, 8))
        plain = dataclasses.replace(plan, shared_prefix=None)
        outputs = [cache.attend(q, 0, p, implementation="reference") for p in (plan, plain)]
        return cache, (*outputs, plan.kv_lens - plan.shared_prefix.own_kv_lens)

    return jax.lax.scan(step, cache, jnp.arange(1, 4))[1]


def assert_decodes_the_same(cache: pkv.PagedKVCache, *seq_ids: int) -> list[int]:
    out, plain, shared = decode(cache, jnp.array(seq_ids))
    np.testing.assert_allclose(out, plain, rtol=4e-6, atol=4e-6)
    assert np.abs(plain).max() > 0.1
    return shared[0].tolist()


def test_forks_decode_over_what_they_share_with_one_program():
    @jax.jit
    def forked():
        cache, first = pkv.PagedKVCache.create(CONFIG), jnp.arange(1)
        cache, result = cache.allocate(first, 170)
        cache, plan = cache.plan(first, 170, result)
        return tokens_in(cache, plan, 0).fork(jnp.zeros(3, jnp.int32), jnp.arange(1, 4))[0]

    cache = forked()
    assert assert_decodes_the_same(cache, 0, 1, 2, 3) == [160] * 4
    assert assert_decodes_the_same(cache, 0, -1, 2, 5) == [160, 0, 160, 0]
    assert assert_decodes_the_same(cache, 3, -1, -1, -1) == [0] * 4
    assert decode._cache_size() == 1


def test_prompts_admitted_over_a_cached_prefix_share_it():
    tokens = jnp.tile(jnp.arange(160), (2, 1)).at[:, 150:].add(jnp.array([[100], [200]]))

    @jax.jit
    def admit(cache, seq_ids):
        lens = jnp.full(2, 160)
        cache, result, found = cache.admit(seq_ids, tokens, lens)
        _, plan = cache.plan(seq_ids, lens - found, result, num_tokens=192, shared_prefix=True)
        return cache.commit(seq_ids, tokens, lens)[0], plan.kv_lens - plan.shared_prefix.own_kv_lens

    cache, shared = admit(pkv.PagedKVCache.create(CONFIG, prefix_reuse=True), jnp.array([0, -1]))
    assert shared.tolist() == [0, 0]
    _, shared = admit(cache, jnp.array([1, 2]))
    assert shared.tolist() == [128, 128]
