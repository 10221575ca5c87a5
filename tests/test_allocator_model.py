"""The allocator driven at random against a plain-Python model, invariants checked after every step."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import paged_kv_jax as pkv

MAX_SEQS, MAX_BLOCKS_PER_SEQ, ROWS = 5, 6, 4
BOUNDS = st.sampled_from([None, 6])  # max_new_tokens

# Compiled once per geometry: shapes are the same throughout.
allocate = jax.jit(pkv.allocate, static_argnames="max_new_tokens")
append = jax.jit(pkv.append, static_argnames="max_new_tokens")
append_one = jax.jit(functools.partial(pkv.append, num_new_tokens=1))
append_seven = jax.jit(functools.partial(pkv.append, num_new_tokens=7))
free = jax.jit(pkv.free)
stats = jax.jit(pkv.stats)

NONSENSE_IDS = [-2, MAX_SEQS, 2**31 - 1, -(2**31)]
NONSENSE_COUNTS = [-1, 40, 2**30, 2**31 - 1, -(2**31)]


@st.composite
def rows_of_ids(draw, padding: int = 0, live_first: bool = False):
    """Distinct ids with some padding, and now and then a duplicate or nonsense."""
    ids = draw(st.permutations(range(MAX_SEQS)))
    if live_first:
        live = draw(st.runner()).model.lens
        ids = sorted(ids, key=lambda seq_id: seq_id not in live)
    ids = draw(st.permutations(ids[: ROWS - padding] + [-1] * padding))
    if draw(st.integers(0, 3)) == 3:
        other = st.one_of(st.integers(0, MAX_SEQS - 1), st.sampled_from(NONSENSE_IDS))
        ids[draw(st.integers(0, ROWS - 1))] = draw(other)
    return ids


@st.composite
def rows_of_counts(draw):
    """Small counts, and now and then one that no sequence can have."""
    counts = draw(st.lists(st.integers(0, 8), min_size=ROWS, max_size=ROWS))
    if draw(st.integers(0, 3)) == 3:
        counts[draw(st.integers(0, ROWS - 1))] = draw(st.sampled_from(NONSENSE_COUNTS))
    return counts


def int32(values) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([24, 7, 12]), block_size=st.sampled_from([1, 4]))
    def start(self, num_blocks: int, block_size: int):
        config = pkv.KVCacheConfig(
            num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=num_blocks, block_size=block_size,
            max_seqs=MAX_SEQS, max_blocks_per_seq=MAX_BLOCKS_PER_SEQ,
        )  # fmt: skip
        self.model = oracle.AllocatorModel(
            num_blocks=num_blocks, block_size=block_size, max_seqs=MAX_SEQS,
            max_blocks_per_seq=MAX_BLOCKS_PER_SEQ,
        )  # fmt: skip
        self.state = pkv.init(config)

    @rule(seq_ids=rows_of_ids(padding=1), counts=rows_of_counts(), bound=BOUNDS)
    def allocate(self, seq_ids, counts, bound):
        self.state, result = allocate(
            self.state, int32(seq_ids), int32(counts), max_new_tokens=bound
        )
        assert result.tolist() == self.model.allocate(seq_ids, counts, bound)

    @precondition(lambda self: self.model.lens)
    @rule(seq_ids=rows_of_ids(live_first=True), counts=rows_of_counts(), bound=BOUNDS)
    def append(self, seq_ids, counts, bound):
        self.state, result = append(self.state, int32(seq_ids), int32(counts), max_new_tokens=bound)
        assert result.tolist() == self.model.append(seq_ids, counts, bound)

    @precondition(lambda self: self.model.lens)
    @rule(seq_ids=rows_of_ids(padding=1, live_first=True), count=st.sampled_from([1, 7]))
    def append_the_same_to_all(self, seq_ids, count):
        self.state, result = {1: append_one, 7: append_seven}[count](self.state, int32(seq_ids))
        assert result.tolist() == self.model.append(seq_ids, [count] * ROWS)

    @precondition(lambda self: self.model.lens)
    @rule(seq_ids=rows_of_ids(padding=3, live_first=True))
    def free(self, seq_ids):
        self.state, result = free(self.state, int32(seq_ids))
        assert result.tolist() == self.model.free(seq_ids)

    @rule()
    def clear_errors(self):
        self.state = pkv.clear_errors(self.state)
        self.model.failures.clear()

    @invariant()
    def the_state_is_the_models(self):
        if not hasattr(self, "state"):
            return
        self.model.check(self.state)
        assert pkv.check_invariants(self.state) == []
        numbers = stats(self.state)
        assert int(numbers.free_blocks) == self.model.num_free
        assert int(numbers.tokens) == sum(self.model.lens.values())
        assert int(numbers.live_seqs) == len(self.model.lens)


AllocatorMachine.TestCase.settings = hypothesis.settings(
    max_examples=85, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
TestAllocatorAgainstTheModel = AllocatorMachine.TestCase
