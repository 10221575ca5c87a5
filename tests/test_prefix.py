"""Prefix reuse: one test for each named behaviour; the random ones are in test_state_machine.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_pool import TokenWorld, config, ids

import paged_kv_jax as pkv
from paged_kv_jax import prefix, prefix_table

ROOM, ROWS = 24, 3  # T, tokens of a row; B

admit = jax.jit(pkv.admit, static_argnames="batch")
commit, match_prefix = jax.jit(pkv.commit), jax.jit(pkv.match_prefix)
evict, forget = jax.jit(pkv.evict), jax.jit(pkv.forget)
make_room = jax.jit(pkv.make_room, static_argnames="batch")
free, append, fork, truncate = (jax.jit(f) for f in (pkv.free, pkv.append, pkv.fork, pkv.truncate))


def rows(*prompts: list[int], pad_to: int = 0) -> tuple[jax.Array, jax.Array]:
    """Prompts as tokens [B, ROOM] and lens [B]; with rows of padding, B is the same for all tests."""
    prompts += ([],) * (pad_to - len(prompts))
    tokens = np.full((len(prompts), ROOM), -7, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return jnp.asarray(tokens), ids(*map(len, prompts))


class PrefixWorld(TokenWorld):
    """A world with an index: `start` admits, prefills what is not found, and commits."""

    def __init__(self, geometry=None, batch: int = 1):
        super().__init__(geometry)
        self.index, self.batch = pkv.init_prefix_index(self.config), batch

    def admit(self, salt=None, **prompts: list[int]) -> tuple[list[int], list[int]]:
        """Results and found tokens; writes what is not found."""
        seq_ids, tokens, lens, salts = self._rows(salt, prompts)
        self.index, self.state, result, found = admit(
            self.index, self.state, seq_ids, tokens, lens, salts, batch=self.batch
        )
        results, founds = (array.tolist()[: len(prompts)] for array in (result, found))
        rest = [
            token
            for prompt, skip, code in zip(prompts.values(), founds, results, strict=True)
            for token in prompt[skip:]
            if code >= 0
        ]
        self.fill(seq_ids, lens - found, result, rest)
        return results, founds

    def commit(self, salt=None, **tokens: list[int]) -> list[int]:
        self.index, self.state, result = commit(self.index, self.state, *self._rows(salt, tokens))
        return result.tolist()[: len(tokens)]

    def _rows(self, salt, prompts):
        seq_ids = [int(name[1:]) for name in prompts]
        padding = [-1] * (ROWS - len(prompts))
        salts = ids(*[0 if salt is None else salt] * ROWS)
        return ids(*seq_ids, *padding), *rows(*prompts.values(), pad_to=ROWS), salts

    def start(self, salt=None, **prompts: list[int]) -> list[int]:
        """Tokens found."""
        result, found = self.admit(salt, **prompts)
        assert min(result) >= 0, result
        self.commit(salt, **prompts)
        return found

    def free(self, *seq_ids: int) -> list[int]:
        self.state, result = free(self.state, ids(*seq_ids))
        return result.tolist()

    def found(self, *prompts: list[int], salt: int = 0) -> list[int]:
        padded = rows(*prompts, pad_to=2 * ROWS)
        _, found = match_prefix(self.index, *padded, ids(*[salt] * 2 * ROWS))
        return found.tolist()[: len(prompts)]

    def check(self) -> None:
        assert pkv.check_index(self.index, self.state) == []


def text(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_second_prompt_reads_the_blocks_of_the_first():
    world = PrefixWorld()
    prompt = text(100, 13)
    assert world.start(s0=prompt) == [0]
    result, found = world.admit(s1=[*prompt[:9], 1, 2, 3, 4, 5])
    assert (result, found) == ([2], [8])
    assert np.asarray(world.state.block_table)[1, :2].tolist() == (
        np.asarray(world.state.block_table)[0, :2].tolist()
    )
    assert world.read(1) == [*prompt[:9], 1, 2, 3, 4, 5]
    assert world.read(0) == prompt
    world.check()


def test_the_last_prompt_token_is_never_covered():
    world = PrefixWorld()
    prompt = text(100, 12)
    world.start(s0=[*prompt, 1])
    assert world.found(prompt, prompt[:9], prompt[:8], prompt[:5], prompt[:4], prompt[:1]) == [
        8, 8, 4, 4, 0, 0,
    ]  # fmt: skip


def test_only_full_blocks_whose_tokens_are_written_are_found():
    world = PrefixWorld()
    prompt = text(100, 11)
    world.admit(s0=prompt)
    assert world.found([*prompt, 1, 2]) == [0]  # room is there, nothing committed
    assert world.commit(s0=prompt[:7]) == [1]
    assert world.found([*prompt, 1, 2]) == [4]
    assert world.commit(s0=prompt) == [1]
    assert world.found([*prompt, 1, 2]) == [8]
    world.check()


def test_equal_tokens_under_another_beginning_are_not_a_hit():
    world = PrefixWorld()
    shared = text(50, 4)
    world.start(s0=[*text(100, 4), *shared, 1])
    assert world.found([*text(200, 4), *shared, 1], [*shared, *shared, 1]) == [0, 0]
    assert world.found([*text(100, 4), *shared, 1]) == [8]


def test_salts_keep_requests_apart():
    world = PrefixWorld()
    prompt = text(100, 9)
    assert world.start(salt=1, s0=prompt) == [0]
    assert world.found(prompt, salt=1) == [8]
    assert world.found(prompt, salt=2) == [0]
    assert world.found(prompt) == [0]
    assert world.start(salt=2, s1=prompt) == [0]
    assert world.start(salt=2, s2=prompt) == [8]
    assert np.asarray(world.state.block_table)[2, 0] == np.asarray(world.state.block_table)[1, 0]
    world.check()


@pytest.mark.parametrize("fault", ["all hashes equal", "two places"])
def test_a_hash_alone_is_never_a_hit(monkeypatch, fault: str):
    """With hashes that collide all the time, what is found is still equal token by token."""
    honest = prefix_table.prefix_hashes

    def weak(tokens, salt, block_size):
        hashes = honest(tokens, salt, block_size)
        return (
            hashes * 0 if fault == "all hashes equal" else hashes.at[..., 0].set(hashes[..., 0] & 1)
        )

    monkeypatch.setattr(prefix, "prefix_hashes", weak)
    monkeypatch.setattr(prefix_table, "PROBES", 1)
    # Compiled anew, so that the weak hash is what they call.
    for name in ("admit", "commit", "match_prefix"):
        static = "batch" if name == "admit" else None
        compiled = jax.jit(functools.partial(getattr(pkv, name)), static_argnames=static)
        monkeypatch.setitem(globals(), name, compiled)
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 2, (9, 10)).tolist()
    world = PrefixWorld(config(num_blocks=64))
    found_any = False
    for _ in range(12):
        seqs = {f"s{seq}": prompts[rng.integers(9)] for seq in (0, 1, 2)}
        found_any |= max(world.start(**seqs)) > 0
        for name, tokens in seqs.items():
            assert world.read(int(name[1:])) == tokens
        world.check()
        world.free(0, 1, 2)
    assert found_any
    assert pkv.prefix_stats(world.index, world.state).left_out_blocks > 0


def test_salts_keep_requests_apart_even_where_no_hash_does(monkeypatch):
    honest = prefix_table.prefix_hashes
    monkeypatch.setattr(prefix, "prefix_hashes", lambda t, salt, size: honest(t, salt * 0, size))
    monkeypatch.setitem(globals(), "commit", jax.jit(functools.partial(pkv.commit)))
    monkeypatch.setitem(globals(), "match_prefix", jax.jit(functools.partial(pkv.match_prefix)))
    world = PrefixWorld()
    prompt = text(100, 9)
    world.extend(s0=9)
    world.commit(salt=1, s0=prompt)
    assert world.found(prompt, salt=1) == [8]
    assert world.found(prompt, salt=2) == [0]


def test_blocks_stay_findable_until_their_space_is_needed():
    world = PrefixWorld(config(num_blocks=8))
    prompt = text(100, 9)
    world.start(s0=prompt)
    assert world.free(0) == [1]  # the partial tail; the index refers to the rest
    assert int(world.state.free_top) == 6
    assert world.start(s1=text(200, 24)) == [0]  # six blocks that were never held
    assert world.found(prompt) == [8]
    world.check()
    world.index, world.state = make_room(world.index, world.state, 1, batch=1)
    assert world.found(prompt) == [4]  # the tail went first
    world.index, world.state = make_room(world.index, world.state, 1, batch=1)
    assert world.found(prompt) == [4]  # there was room already
    world.index, world.state = make_room(world.index, world.state, 2, batch=1)
    assert world.found(prompt) == [0]
    assert int(world.state.free_top) == 2
    world.check()


def test_the_least_recently_used_prefix_is_evicted_first():
    world = PrefixWorld()
    first, second, third = text(100, 9), text(200, 9), text(300, 9)
    for seq, prompt in enumerate((first, second, third)):
        world.start(**{f"s{seq}": prompt})
    world.free(0, 1, 2)
    assert world.start(s0=first) == [8]
    world.free(0)
    for expected in ([8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0], [0, 0, 0]):
        world.index, world.state, count = evict(world.index, world.state, 1)
        assert int(count) == 1
        assert world.found(first, second, third) == expected
        world.check()
    world.index, world.state, count = evict(world.index, world.state, 5)
    assert int(count) == 0
    assert int(world.state.free_top) == 16


def test_being_found_is_a_use():
    world = PrefixWorld()
    first, second = text(100, 9), text(200, 9)
    world.start(s0=first)
    world.start(s1=second)
    assert world.admit(s2=first) == ([1], [8])  # and nothing is committed after it
    world.free(0, 1, 2)
    world.index, world.state, _ = evict(world.index, world.state, 1)
    assert world.found(first, second) == [8, 4]
    world.check()


def test_what_a_sequence_uses_is_not_evicted():
    world = PrefixWorld()
    prompt = text(100, 9)
    world.start(s0=prompt)
    world.index, world.state, count = evict(world.index, world.state, 16)
    assert int(count) == 0
    assert world.found(prompt) == [8]
    assert world.read(0) == prompt


def test_admission_evicts_for_new_prompts_but_not_what_they_found():
    world = PrefixWorld(config(num_blocks=6))
    old, kept = text(100, 9), text(200, 9)
    world.start(s0=old, s1=kept)
    world.free(0, 1)
    result, found = world.admit(s2=[*kept, *text(300, 11)])  # 5 blocks, 2 found, 2 free
    assert (result, found) == ([3], [8])
    assert world.read(2) == [*kept, *text(300, 11)]
    assert world.found(old) == [4]
    world.check()


def test_a_prompt_that_cannot_fit_evicts_nothing_and_is_refused():
    world = PrefixWorld(config(num_blocks=6))
    world.start(s0=text(100, 9))
    world.start(s1=text(200, 9))
    world.free(0)
    before = world.state
    result, found = world.admit(s2=text(300, 21))  # 6 blocks; only 3 + 0 can be had
    assert (result, found) == ([-1], [0])
    assert world.found(text(100, 9)) == [8]
    np.testing.assert_array_equal(world.state.ref_count, before.ref_count)
    assert int(world.state.seq_lens[2]) == 0
    world.check()


def test_admit_failures_are_reported_and_touch_nothing():
    world = PrefixWorld(config(max_blocks_per_seq=4))
    world.start(s0=text(100, 9))
    before = world.state
    tokens, _ = rows(text(100, 9))
    bad = (
        (0, 9, -2),
        (6, 9, -2),
        (-3, 9, -2),
        (1, 0, -5),
        (1, ROOM + 1, -5),
        (1, -4, -5),
        (1, 17, -3),
    )
    for seq, length, code in bad:
        _, state, result, found = admit(world.index, before, ids(seq), tokens, ids(length))
        assert (result.tolist(), found.tolist()) == ([code], [0])
        for field in dataclasses.fields(state):
            if field.name not in ("errors", "block_size"):
                np.testing.assert_array_equal(
                    getattr(state, field.name), getattr(before, field.name)
                )
    _, state, result, found = admit(
        world.index, before, ids(-1, 1, 1), jnp.tile(tokens, (3, 1)), ids(9, 9, 9)
    )
    assert (result.tolist(), found.tolist()) == ([0, 1, -4], [0, 8, 0])


def test_commit_failures_are_reported_and_hold_nothing():
    world = PrefixWorld()
    world.admit(s0=text(100, 9))
    tokens, _ = rows(text(100, 9))
    for seq, length, code in ((1, 9, -2), (6, 9, -2), (0, 10, -5), (0, -1, -5), (0, ROOM + 1, -5)):
        index, state, result = commit(world.index, world.state, ids(seq), tokens, ids(length))
        assert result.tolist() == [code]
        assert not np.any(np.asarray(index.is_held))
        np.testing.assert_array_equal(state.ref_count, world.state.ref_count)
        with pytest.raises(pkv.PagedKVError, match=pkv.ResultCode(code).name):
            pkv.raise_if_failed(state)


def test_equal_prompts_in_one_batch_are_held_once_and_both_are_read():
    world = PrefixWorld()
    prompt = text(100, 9)
    result, found = world.admit(s0=prompt, s1=prompt, s2=[*prompt[:4], *text(200, 5)])
    assert (result, found) == ([3, 3, 3], [0, 0, 0])  # none was written when they came
    assert world.commit(s0=prompt, s1=prompt, s2=[*prompt[:4], *text(200, 5)]) == [0, 1, 2]
    world.check()
    assert int(np.sum(np.asarray(world.index.is_held))) == 3
    assert world.start(s3=prompt, s4=[*prompt[:4], *text(200, 5)]) == [8, 8]
    for seq in (0, 1, 3):
        assert world.read(seq) == prompt
    world.check()


@pytest.mark.parametrize("salts", [(5, 5), (5, 6)])
def test_a_block_that_forks_share_is_held_once_even_if_they_disagree_about_it(salts):
    world = PrefixWorld()
    prompt = text(100, 8)
    world.admit(s0=prompt)
    world.state, _, _ = fork(world.state, ids(0), ids(1))
    tokens, lens = rows(prompt, prompt, pad_to=ROWS)
    world.index, world.state, result = commit(
        world.index, world.state, ids(0, 1, -1), tokens, lens, ids(*salts, 0)
    )
    assert result.tolist() == [2, 0, 0]
    assert world.found([*prompt, 1], salt=5) == [8]
    assert world.found([*prompt, 1], salt=6) == [0]
    world.check()


def test_a_sequence_never_writes_into_a_held_block():
    """Rolling back into a block that the index holds gives the sequence a block of its own."""
    world = PrefixWorld()
    prompt = text(100, 8)
    world.start(s0=prompt)
    world.state, result, copies = truncate(world.state, ids(0), ids(6))
    world.copy(copies)
    assert result.tolist() == [0]
    new = world.extend(s0=2)["s0"]
    assert world.read(0) == prompt[:6] + new
    assert world.start(s1=[*prompt, 1]) == [8]
    assert world.read(1) == [*prompt, 1]
    world.check()


def test_a_recycled_parent_is_no_parent():
    """An entry whose parent's block was evicted and reused for other tokens can't be reached."""
    world = PrefixWorld(config(num_blocks=8))
    head, tail = text(100, 4), text(200, 5)
    world.start(s0=[*head, *tail])
    # s1 holds its own copy of the head, so that the index's head can go while s1 uses the tail's.
    world.state, _, copies = fork(world.state, ids(0), ids(1))
    world.copy(copies)
    world.state, _ = jax.jit(pkv.release_before)(world.state, ids(1), ids(4))
    world.free(0)
    head_block = int(
        np.flatnonzero(np.asarray(world.index.depth == 0) & np.asarray(world.index.is_held))[0]
    )
    world.index, world.state, count = evict(world.index, world.state, 8)
    assert int(count) == 1  # the head; what hung below it is in use, but is no longer found
    assert not np.any(np.asarray(world.index.is_held))
    world.check()
    world.start(s2=[*text(300, 4), 1])
    assert int(world.state.block_table[2, 0]) == head_block  # recycled
    assert world.found([*text(300, 4), *tail]) == [4]
    assert world.found([*head, *tail]) == [0]
    world.check()


def test_forget_finds_nothing_and_leaves_live_sequences_alone():
    world = PrefixWorld()
    prompt = text(100, 9)
    world.start(s0=prompt, s1=text(200, 9))
    world.free(1)
    world.index, world.state, count = forget(world.index, world.state)
    assert int(count) == 2
    assert world.found(prompt, text(200, 9)) == [0, 0]
    assert world.read(0) == prompt
    world.check()
    assert world.free(0) == [3]
    assert int(world.state.free_top) == 16
    assert world.start(s0=prompt) == [0]


def test_statistics_count_what_was_looked_up_and_found():
    world = PrefixWorld()
    world.start(s0=text(100, 13))
    world.start(s1=text(100, 9), s2=text(500, 5))
    stats = pkv.prefix_stats(world.index, world.state)
    assert stats.looked_up_tokens == 12 + 8 + 4
    assert stats.found_tokens == 8
    assert stats.hit_rate == pytest.approx(1 / 3)
    assert stats.held_blocks == 4
    assert stats.idle_blocks == 0
    world.free(0, 1, 2)
    assert pkv.prefix_stats(world.index, world.state).idle_blocks == 4


def test_counters_do_not_wrap_at_32_bits():
    counts = jnp.array([[2**32 - 2, 0], [5, 1], [0, 0]], jnp.uint32)
    after = prefix_table.count(counts, jnp.int32(7), jnp.int32(0), jnp.int32(1))
    assert after.tolist() == [[5, 1], [5, 1], [1, 0]]


def test_the_least_recently_used_is_right_where_the_clock_wraps():
    world = PrefixWorld()
    world.index = dataclasses.replace(world.index, clock=jnp.uint32(2**32 - 1))
    world.start(s0=text(100, 5))
    world.start(s1=text(200, 5))
    world.free(0, 1)
    world.index, world.state, _ = evict(world.index, world.state, 1)
    assert world.found(text(100, 5), text(200, 5)) == [0, 4]


def test_64_prompts_of_4096_tokens_are_matched_in_one_call():
    rng = np.random.default_rng(0)
    geometry = config(num_blocks=1024, block_size=16, max_seqs=2, max_blocks_per_seq=256)
    system = rng.integers(0, 50_000, 4096, dtype=np.int32)
    tokens = np.tile(system, (64, 1))
    keep = rng.integers(0, 4096, 64)
    for row in range(64):  # each prompt follows the system prompt for a while
        tokens[row, keep[row]] += 1
    state, index = pkv.init(geometry), pkv.init_prefix_index(geometry)
    lens = ids(4096)
    state, _ = pkv.allocate(state, ids(0), 4096)
    index, state, result = commit(index, state, ids(0), jnp.asarray(system[None]), lens)
    assert result.tolist() == [256]
    blocks, found = match_prefix(index, jnp.asarray(tokens), ids(*[4096] * 64))
    assert found.tolist() == [k // 16 * 16 for k in keep]
    own = np.asarray(state.block_table)[0]
    for row in range(64):
        assert np.asarray(blocks)[row].tolist() == [
            int(own[column]) if column < keep[row] // 16 else -1 for column in range(256)
        ]


def test_hit_or_miss_and_eviction_compile_nothing_again():
    world = PrefixWorld(config(num_blocks=7))
    traces = []

    @jax.jit
    def step(index, state, seq_ids, tokens, lens):
        traces.append(None)
        index, state, _, found = pkv.admit(index, state, seq_ids, tokens, lens, batch=1)
        index, state, _ = pkv.commit(index, state, seq_ids, tokens, lens)
        index, state = pkv.make_room(index, state, 1, batch=1)
        state, _ = pkv.free(state, seq_ids)
        return index, state, found

    found = []
    for start in (100, 100, 200, 300, 400, 400, 100):
        world.index, world.state, new = step(
            world.index, world.state, ids(0, -1), *rows(text(start, 9), [])
        )
        found.append(int(new[0]))
        world.check()
    assert found == [0, 8, 0, 0, 0, 8, 0]
    assert len(traces) == 1


def test_rows_that_do_not_agree_raise_and_name_the_argument():
    world = PrefixWorld()
    tokens, lens = rows([1, 2, 3])
    with pytest.raises(ValueError, match="lens has shape"):
        pkv.match_prefix(world.index, tokens, ids(1, 2))
    with pytest.raises(ValueError, match="salt has shape"):
        pkv.admit(world.index, world.state, ids(0), tokens, lens, ids(1, 2))
    with pytest.raises(ValueError, match="tokens has shape"):
        pkv.commit(world.index, world.state, ids(0, 1), tokens, lens)
