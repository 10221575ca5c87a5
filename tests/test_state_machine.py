"""Every operation driven at random against a plain-Python model, with the tokens that sequences read.

After each step the state must be the model's, every invariant must hold, and every sequence must read
its own tokens through its table: no sharing, copying, evicting, moving or swapping may change them.
SOAK_STEPS sets the number of steps (`make soak`: 200,000).
"""

import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sharing_model import SharingModel
from token_pool import TokenWorld, ids

import paged_kv_jax as pkv

STEPS, STEPS_PER_RUN = int(os.environ.get("SOAK_STEPS", "5000")), 50
MAX_SEQS, MAX_BLOCKS_PER_SEQ, BLOCK_SIZE, ROWS, BATCH = 5, 6, 2, 3, 2
WIDTH = MAX_BLOCKS_PER_SEQ * BLOCK_SIZE + 1  # T: one token more than a sequence may have
SIZES = (12, 17)  # num_blocks: always under pressure

jitted = {
    name: jax.jit(getattr(pkv, name))
    for name in (
        "allocate", "append", "free", "fork", "truncate", "release_before", "commit", "evict", "forget",
        "match_prefix",
    )
}  # fmt: skip
admit = jax.jit(functools.partial(pkv.admit, batch=BATCH))
make_room = jax.jit(functools.partial(pkv.make_room, batch=BATCH))

# Few different tokens, so that prompts often begin alike.
TEXTS = st.lists(st.sampled_from([1, 1, 2]), min_size=WIDTH, max_size=WIDTH)
COUNTS = st.lists(
    st.one_of(st.integers(0, 6), st.integers(0, WIDTH + 1), st.sampled_from([-1, 2**30])),
    min_size=ROWS, max_size=ROWS,
)  # fmt: skip
SALTS = st.sampled_from([0, 0, 7])


@st.composite
def some_ids(draw):
    """Mostly distinct sequences and padding; now and then a duplicate or nonsense."""
    chosen = draw(st.permutations(range(MAX_SEQS)))[:ROWS]
    if draw(st.booleans()):
        chosen[draw(st.integers(0, ROWS - 1))] = -1
    if draw(st.integers(0, 9)) == 9:
        chosen[draw(st.integers(0, ROWS - 1))] = draw(
            st.sampled_from([0, 1, -2, MAX_SEQS, 2**31 - 1])
        )
    return chosen


class SharingMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from(SIZES))
    def start(self, num_blocks: int):
        geometry = dict(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_seqs=MAX_SEQS,
            max_blocks_per_seq=MAX_BLOCKS_PER_SEQ,
        )  # fmt: skip
        self.world = TokenWorld(
            pkv.KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", **geometry)
        )
        self.model = SharingModel(**geometry)
        self.index = pkv.init_prefix_index(self.world.config)
        self.host = pkv.HostPool(capacity=8)
        self.texts: dict[int, list[int]] = {}  # of live sequences
        self.salts: dict[int, int] = {}
        self.swapped: dict[
            int, tuple[list[int], int, int]
        ] = {}  # text, salt, columns behind a window

    # Sequences come, grow and go

    @rule(seq_ids=some_ids(), counts=COUNTS, text=TEXTS, salt=SALTS)
    def allocate(self, seq_ids, counts, text, salt):
        self._grow("allocate", seq_ids, counts, text, salt)

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids(), counts=COUNTS, text=TEXTS)
    def append(self, seq_ids, counts, text):
        self._grow("append", seq_ids, counts, text, 0)

    def _grow(self, name, seq_ids, counts, text, salt):
        result = self._call(name, ids(*seq_ids), ids(*counts))
        assert result.tolist() == getattr(self.model, name)(seq_ids, counts)
        written = []
        for seq, count, code in zip(seq_ids, counts, result.tolist(), strict=True):
            if seq >= 0 and code >= 0 and count:
                self.texts.setdefault(seq, []).extend(text[:count])
                self.salts.setdefault(seq, salt)
                written += text[:count]
        counts = ids(*(min(max(count, 0), WIDTH) for count in counts))
        self.world.fill(ids(*seq_ids), counts, result, written)

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids())
    def free(self, seq_ids):
        result = self._call("free", ids(*seq_ids))
        assert result.tolist() == self.model.free(seq_ids)
        self._forget_ended()

    # Sharing

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), children=some_ids(), counts=COUNTS, whole=st.booleans())
    def fork(self, data, children, counts, whole):
        live = st.sampled_from([*self.texts, *self.texts, -1])
        parents = data.draw(st.lists(live, min_size=ROWS, max_size=ROWS), label="parents")
        if whole:
            counts = [self.model.lens.get(parent, 1) for parent in parents]
        lengths = ids(*counts)
        self.world.state, result, copies = jitted["fork"](
            self.world.state, ids(*parents), ids(*children), lengths
        )
        assert result.tolist() == self.model.fork(parents, children, counts)
        self.world.copy(copies)
        for parent, child, count, code in zip(
            parents, children, counts, result.tolist(), strict=True
        ):
            if child >= 0 and code >= 0:
                self.texts[child] = self.texts[parent][:count]
                self.salts[child] = self.salts[parent]

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids(), counts=COUNTS, back=st.integers(0, 4))
    def truncate(self, seq_ids, counts, back):
        if back:  # the usual case: a few tokens are rolled back
            counts = [max(0, self.model.lens.get(seq, 0) - back) for seq in seq_ids]
        self.world.state, result, copies = jitted["truncate"](
            self.world.state, ids(*seq_ids), ids(*counts)
        )
        assert result.tolist() == self.model.truncate(seq_ids, counts)
        self.world.copy(copies)
        for seq, count, code in zip(seq_ids, counts, result.tolist(), strict=True):
            if seq >= 0 and code >= 0:
                del self.texts[seq][count:]
        self._forget_ended()

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids(), window=st.integers(0, 7))
    def release_before(self, seq_ids, window):
        positions = [self.model.lens.get(seq, 0) - window for seq in seq_ids]
        result = self._call("release_before", ids(*seq_ids), ids(*positions))
        assert result.tolist() == self.model.release_before(seq_ids, positions)

    # Prefix reuse

    @rule(seq_ids=some_ids(), counts=COUNTS, texts=st.tuples(*[TEXTS] * ROWS), salt=SALTS)
    def admit(self, seq_ids, counts, texts, salt):
        tokens, salts = np.array(texts, np.int32), [salt] * ROWS
        self.index, self.world.state, result, found = admit(
            self.index, self.world.state, ids(*seq_ids), tokens, ids(*counts), ids(*salts)
        )
        expected = self.model.admit(seq_ids, texts, counts, salts, BATCH, WIDTH)
        assert (result.tolist(), found.tolist()) == expected
        written = []
        for seq, text, count, code, skip in zip(
            seq_ids, texts, counts, result.tolist(), found.tolist(), strict=True
        ):
            if seq >= 0 and code >= 0:
                self.texts[seq], self.salts[seq] = text[:count], salt
                written += text[skip:count]
        rest = np.clip(np.array(counts) - np.asarray(found), 0, WIDTH)
        self.world.fill(ids(*seq_ids), ids(*rest), result, written)

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids(), short=st.sampled_from([0, 0, 0, 1, -1]))
    def commit(self, seq_ids, short):
        texts = [(self.texts.get(seq, []) + [0] * WIDTH)[:WIDTH] for seq in seq_ids]
        lens = [self.model.lens.get(seq, 0) - short for seq in seq_ids]
        salts = [self.salts.get(seq, 0) for seq in seq_ids]
        self.index, self.world.state, result = jitted["commit"](
            self.index, self.world.state, ids(*seq_ids), np.array(texts, np.int32), ids(*lens),
            ids(*salts),
        )  # fmt: skip
        assert result.tolist() == self.model.commit(seq_ids, texts, lens, salts, WIDTH)

    @rule(text=TEXTS, length=st.integers(0, WIDTH), salt=SALTS)
    def match_prefix(self, text, length, salt):
        blocks, found = jitted["match_prefix"](
            self.index, np.array([text], np.int32), ids(length), ids(salt)
        )
        path = self.model.match(text, length, salt)
        assert np.asarray(blocks)[0, : len(path)].tolist() == path
        assert found.tolist() == [len(path) * BLOCK_SIZE]

    @rule(needed=st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS))
    def make_room(self, needed):
        self.index, self.world.state = make_room(self.index, self.world.state, ids(*needed))
        self.model.make_room(needed, BATCH)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        self.index, self.world.state, freed = jitted["evict"](self.index, self.world.state, count)
        assert int(freed) == self.model.evict(count)

    @precondition(lambda self: self.model.held)
    @rule(sure=st.integers(0, 5))
    def forget(self, sure):
        if sure:  # rarely: there should be something to find
            return
        self.index, self.world.state, freed = jitted["forget"](self.index, self.world.state)
        assert int(freed) == self.model.forget()

    # Moving

    @precondition(lambda self: self.texts)
    @rule(seq_ids=some_ids())
    def swap_out(self, seq_ids):
        tables = {seq: list(table) for seq, table in self.model.tables.items()}
        expected, room = [], self.host.capacity - self.host.used_blocks
        for row, seq in enumerate(seq_ids):
            code = self.model._seq_failure(seq_ids, row, self.model.lens)
            if code is None and seq in self.swapped:
                code = -2
            if code is None:
                code = len(tables[seq]) - tables[seq].count(-1)
                if code > room:
                    code, room = -1, 0
                else:
                    room -= code
            expected.append(code)
        self.world.state, self.host, result = pkv.swap_out(
            self.world.state, self.world.pool, self.host, ids(*seq_ids)
        )
        assert result.tolist() == expected
        gone = [seq if code >= 0 else -1 for seq, code in zip(seq_ids, expected, strict=True)]
        self.model.failures |= {code for code in expected if code < 0}
        self.model.free(gone)
        for seq in gone:
            if seq >= 0:
                self.swapped[seq] = (self.texts[seq], self.salts[seq], tables[seq].count(-1))
        self._forget_ended()

    @precondition(lambda self: self.swapped)
    @rule(seq_ids=some_ids())
    def swap_in(self, seq_ids):
        expected, exhausted = [], False
        for row, seq in enumerate(seq_ids):
            code = self.model._seq_failure(seq_ids, row, self.swapped)
            if code is None and seq in self.model.lens:
                code = -2
            if code is None:
                text, salt, behind = self.swapped[seq]
                code = -(-len(text) // BLOCK_SIZE) - behind
                if code and (exhausted or code > self.model.num_free):
                    code, exhausted = -1, True
                else:
                    self.model.num_free -= code
                    self.model.lens[seq] = len(text)
                    self.model.tables[seq] = [-1] * behind + [None] * code
                    self.texts[seq], self.salts[seq] = text, salt
            expected.append(code)
        self.world.state, self.world.pool, self.host, result = pkv.swap_in(
            self.world.state, self.world.pool, self.host, ids(*seq_ids)
        )
        assert result.tolist() == expected
        self.model.failures |= {code for code in expected if code < 0}
        for seq, code in zip(seq_ids, expected, strict=True):
            if seq >= 0 and code >= 0:
                del self.swapped[seq]

    @rule(num_blocks=st.sampled_from(SIZES), sure=st.integers(0, 3))
    def resize(self, num_blocks, sure):
        if sure or self.model.num_blocks - self.model.num_free > num_blocks:
            return
        self.world.state, self.world.pool, self.index = pkv.resize(
            self.world.state, self.world.pool, num_blocks, self.index
        )
        self.model.compact(num_blocks)

    # What always holds

    @invariant()
    def the_state_is_the_models_and_sequences_read_their_own_tokens(self):
        if not hasattr(self, "world"):
            return
        self.model.check(self.world.state, self.index)
        assert pkv.check_index(self.index, self.world.state) == []
        for seq, text in self.texts.items():
            behind = self.model.tables[seq].count(-1) * BLOCK_SIZE
            assert self.world.read(seq) == [None] * behind + text[behind:]
        numbers = pkv.prefix_stats(self.index, self.world.state)
        assert numbers.looked_up_tokens == self.model.looked_up * BLOCK_SIZE
        assert numbers.found_tokens == self.model.found * BLOCK_SIZE
        assert numbers.left_out_blocks == 0

    def _call(self, name, *args):
        self.world.state, result = jitted[name](self.world.state, *args)
        return result

    def _forget_ended(self):
        for seq in [seq for seq in self.texts if seq not in self.model.lens]:
            del self.texts[seq], self.salts[seq]


SharingMachine.TestCase.settings = hypothesis.settings(
    max_examples=STEPS // STEPS_PER_RUN, stateful_step_count=STEPS_PER_RUN, deadline=None,
    derandomize=STEPS <= 5000, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
TestEveryOperationAgainstTheModel = SharingMachine.TestCase
