"""The scheduler's pure functions: what is submitted, what is cancelled, who gets blocks, what is planned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import cache_config

import paged_kv_jax as pkv
from paged_kv_jax.admission import admit, grow
from paged_kv_jax.scheduler import (
    Requests,
    Scheduler,
    ServingConfig,
    Status,
    cancel,
    check_scheduler,
    refusal,
    submit,
)
from paged_kv_jax.serving import plan_batch

pytestmark = pytest.mark.slow

CONFIG = ServingConfig(
    cache=cache_config(12, max_seqs=3), max_requests=5, mixed_sizes=(4, 8), decode_sizes=(1, 2)
)
jitted_submit, jitted_cancel = jax.jit(submit), jax.jit(cancel)
jitted_admit, jitted_grow, jitted_plan = (
    jax.jit(functools.partial(function, config=CONFIG)) for function in (admit, grow, plan_batch)
)
ARRIVALS = iter(range(10**6))


def submitted(scheduler, ids, prompt_lens, new_tokens, groups=None):
    """The scheduler with requests of these lengths, in order, and the result codes."""
    order = [next(ARRIVALS) for _ in ids]
    new = dataclasses.replace(
        Requests.empty(CONFIG, len(ids)),
        prompt_lens=jnp.array(prompt_lens, jnp.int32),
        max_new_tokens=jnp.array(new_tokens, jnp.int32),
        arrival=jnp.array(order, jnp.int32),
        group=jnp.array(order if groups is None else groups, jnp.int32),
    )
    scheduler, code = jitted_submit(scheduler, jnp.array(ids, jnp.int32), new)
    return scheduler, code.tolist()


def waiting(scheduler):
    return np.asarray(scheduler.waiting)[: int(scheduler.queue_len)].tolist()


def with_computed(scheduler, counts):
    """As if the slots had computed so many tokens."""
    return dataclasses.replace(scheduler, num_computed=jnp.array(counts, jnp.int32))


def with_token(scheduler, entry):
    """As if the request in `entry` had chosen a token."""
    lens = scheduler.requests.lens.at[entry].add(1)
    requests = dataclasses.replace(scheduler.requests, lens=lens)
    return dataclasses.replace(scheduler, requests=requests)


def test_requests_queue_in_order_and_what_cannot_be_served_is_refused():
    scheduler, code = submitted(
        Scheduler.create(CONFIG), [4, 0, -1, 1, 2, 3], [5, 40, 9, 0, 38, 9], [1, 2, 9, 3, 3, 0]
    )
    # Positions 0 to 39 hold a sequence; the last new token takes none.
    assert code == [0, -3, 0, -5, 0, -5]
    assert waiting(scheduler) == [4, 2]
    assert scheduler.requests.status.tolist() == [7, 7, 1, 7, 1]
    assert check_scheduler(scheduler) == []
    # What waits is in use; what was refused is not.
    scheduler, code = submitted(scheduler, [4, 0, 9], [3, 3, 3], [1, 1, 1])
    assert code == [-2, 0, -2]
    assert waiting(scheduler) == [4, 2, 0]


@pytest.mark.parametrize("xp", [np, jnp])
def test_a_request_that_fills_everything_fits_and_one_more_token_does_not(xp):
    long, small = cache_config(12), cache_config(5)
    assert refusal(long, 30, 11, xp=xp) == 0
    assert refusal(long, 30, 12, xp=xp) == pkv.ResultCode.SEQ_TOO_LONG
    assert refusal(small, 10, 11, xp=xp) == 0
    assert refusal(small, 10, 12, xp=xp) == pkv.ResultCode.OUT_OF_BLOCKS
    assert refusal(long, 2**31 - 1, 2**31 - 1, xp=xp) == pkv.ResultCode.SEQ_TOO_LONG


def test_cancelled_requests_leave_queue_and_slots_and_the_rest_keeps_its_order():
    scheduler = Scheduler.create(CONFIG)
    # The ring goes round its end: start at entry 3 of the queue.
    scheduler = dataclasses.replace(scheduler, queue_start=jnp.int32(3))
    scheduler, _ = submitted(scheduler, [0, 1, 2, 3, 4], [6, 5, 9, 3, 4], [2] * 5)
    scheduler = jitted_admit(scheduler)
    assert scheduler.slot_request.tolist() == [0, 1, -1]
    assert waiting(scheduler) == [2, 3, 4]
    scheduler = jitted_cancel(scheduler, jnp.array([False, True, False, True, False]))
    assert scheduler.slot_request.tolist() == [0, -1, -1]
    assert waiting(scheduler) == [2, 4]
    assert check_scheduler(scheduler) == []
    assert pkv.check_invariants(scheduler.cache.state) == []
    assert int(scheduler.cache.state.free_top) == 10
    status = [Status.RUNNING, Status.CANCELLED, Status.WAITING, Status.CANCELLED, Status.WAITING]
    assert scheduler.requests.status.tolist() == status


def test_admission_stops_at_the_first_that_has_to_wait():
    # The second takes what the budget of 8 tokens leaves; for the third there is no token left.
    scheduler, _ = submitted(Scheduler.create(CONFIG), [0, 1, 2], [5, 6, 1], [1, 1, 1])
    scheduler = jitted_admit(scheduler)
    assert waiting(scheduler) == [2]
    # With the budget free again, 32 tokens do not fit into 9 blocks that keep one in reserve.
    scheduler, _ = submitted(scheduler, [3, 4], [33, 2], [1, 1])
    scheduler = with_computed(scheduler, [4, 5, 0])
    scheduler = jitted_admit(scheduler)
    assert scheduler.slot_request.tolist() == [0, 1, 2]
    assert waiting(scheduler) == [3, 4]


def test_an_admission_leaves_a_block_to_each_that_may_need_more():
    for new_tokens, enters in ((1, True), (2, False)):
        # Blocks of 4: 4 of 12 are taken, and with more than a new token a fifth will be needed.
        scheduler, _ = submitted(Scheduler.create(CONFIG), [0], [16], [new_tokens])
        scheduler = with_computed(jitted_admit(scheduler), [15, 0, 0])
        scheduler, _ = submitted(scheduler, [1], [32], [1])
        scheduler = jitted_admit(scheduler)
        assert (waiting(scheduler) == []) == enters


def test_the_samples_of_a_prompt_wait_for_the_first_and_then_fork():
    scheduler, _ = submitted(Scheduler.create(CONFIG), [0, 1, 2], [6, 6, 6], [1] * 3, [7, 7, 7])
    scheduler = jitted_admit(scheduler)
    assert scheduler.slot_request.tolist() == [0, -1, -1]
    scheduler = jitted_admit(with_computed(scheduler, [4, 0, 0]))
    assert scheduler.slot_request.tolist() == [0, -1, -1]
    scheduler = jitted_admit(with_computed(scheduler, [5, 0, 0]))
    assert scheduler.slot_request.tolist() == [0, 1, 2]
    assert scheduler.num_computed.tolist() == [5, 5, 5]
    table = np.asarray(scheduler.cache.state.block_table)
    assert table[0, 0] == table[1, 0] == table[2, 0]
    assert len({*table[:, 1].tolist()}) == 3
    assert scheduler.cache.state.seq_lens.tolist() == [6, 6, 6]
    assert pkv.check_invariants(scheduler.cache.state) == []


def test_the_youngest_makes_way_for_the_oldest():
    scheduler, _ = submitted(Scheduler.create(CONFIG), [3, 1, 0, 2], [4, 3, 4, 1], [30, 3, 30, 1])
    scheduler = jitted_admit(scheduler)
    scheduler = with_computed(scheduler, [4, 2, 3])
    scheduler = jitted_admit(scheduler)
    assert scheduler.slot_request.tolist() == [3, 1, 0]
    # The pool is full, and the oldest needs a block.
    cache, _ = scheduler.cache.allocate(jnp.array([1]), 28 + 8)
    scheduler = dataclasses.replace(scheduler, cache=cache)
    assert int(cache.state.free_top) == 0
    scheduler = jitted_grow(with_token(scheduler, 3))
    assert scheduler.slot_request.tolist() == [3, 1, -1]
    assert waiting(scheduler) == [0, 2]  # before what came after it
    assert int(scheduler.counts.preemptions) == 1
    assert int(scheduler.cache.state.seq_lens[0]) == 5
    assert int(scheduler.errors) == 0


def test_decoding_rows_go_first_and_prompts_fill_the_budget_oldest_first():
    scheduler, _ = submitted(Scheduler.create(CONFIG), [2, 0, 4], [7, 9, 2], [9, 9, 9])
    scheduler = jitted_admit(scheduler)
    scheduler = jitted_admit(with_computed(scheduler, [6, 5, 0]))
    assert scheduler.slot_request.tolist() == [2, 0, 4]

    def planned(computed):
        batch = jitted_plan(with_computed(scheduler, computed))
        return batch.slots.tolist(), batch.q_lens.tolist(), int(batch.size_index)

    # Sizes are decode 1, 2, 3, then mixed 4, 8.
    assert planned([6, 0, 0]) == ([0, 1, 2], [1, 7, 0], 4)
    assert planned([6, 7, 0]) == ([0, 1, 2], [1, 2, 2], 4)
    assert planned([5, 8, 1]) == ([1, 2, 0], [1, 1, 2], 3)
    assert planned([6, 8, 1]) == ([0, 1, 2], [1, 1, 1], 2)
    empty = jitted_plan(Scheduler.create(CONFIG))
    assert int(empty.size_index) == -1


def test_broken_invariants_are_named():
    scheduler, _ = submitted(Scheduler.create(CONFIG), [0, 1, 2], [4, 4, 4], [3, 3, 3])
    scheduler = jitted_admit(scheduler)
    swapped = dataclasses.replace(scheduler, slot_request=jnp.array([2, 1, -1], jnp.int32))
    assert "what is in the slots is not what is RUNNING" in check_scheduler(swapped)
    done = with_computed(scheduler, [4, 0, 0])
    assert check_scheduler(done) == ["a running request has nothing left to compute"]
    empty = dataclasses.replace(scheduler, queue_len=jnp.int32(0))
    assert check_scheduler(empty) == ["what is in the queue is not what is WAITING or SWAPPED"]
