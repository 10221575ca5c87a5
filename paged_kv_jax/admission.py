"""Who gets blocks: running requests before waiting ones, older ones before younger ones.

`grow` gives running requests room for their next tokens and, where too few blocks are free, preempts the
youngest, so that the oldest always goes on; `admit` lets waiting requests in, first come first served;
`retire` takes back what ended requests held.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from paged_kv_jax.cache import PagedKVCache
from paged_kv_jax.eviction import idle_blocks, make_room
from paged_kv_jax.prefix import match_prefix
from paged_kv_jax.scheduler import Scheduler, ServingConfig, Status, vacate

T = TypeVar("T")


def grow(scheduler: Scheduler, config: ServingConfig) -> Scheduler:
    """Room for the token that each running request chose last; the youngest make way on a shortage.

    With `config.swaps` none is preempted: on a shortage nobody grows, and `is_stalled` tells the host.
    """
    if scheduler.cache.index is not None:
        scheduler = once(
            _blocks_needed(scheduler) > scheduler.cache.state.free_top, _evict, scheduler
        )
    if config.swaps:
        is_short = _blocks_needed(scheduler) > scheduler.cache.state.free_top
        scheduler = dataclasses.replace(scheduler, is_stalled=is_short)
    else:
        scheduler = jax.lax.while_loop(
            lambda s: (_blocks_needed(s) > s.cache.state.free_top) & (jnp.sum(s.is_running) > 1),
            _preempt_youngest,
            scheduler,
        )
    slots = jnp.arange(scheduler.slot_request.shape[0], dtype=jnp.int32)
    grows = _lacks_room(scheduler) & ~scheduler.is_stalled
    cache, _ = scheduler.cache.append(jnp.where(grows, slots, -1), 1)
    return dataclasses.replace(scheduler, cache=cache)


def admit(scheduler: Scheduler, config: ServingConfig) -> Scheduler:
    """Let waiting requests in, first come first served: none passes one that has to wait.

    The first in the queue has to wait while there is no free slot, no token left in the step's budget
    for it, too few blocks for all its tokens, or a request of its group that still computes the prompt
    they share. So that those who run can go on for a while, an admission leaves one block to each that
    may need more than it has, the newcomer included: where none runs, the first can always come in.
    """
    wanted = jnp.where(
        scheduler.is_running, scheduler.requests.lens[scheduler.running] - scheduler.num_computed, 0
    )
    budget = config.max_step_tokens - jnp.sum(wanted, dtype=jnp.int32)
    may_admit = (scheduler.queue_len > 0) & ~jnp.all(scheduler.is_running)
    may_admit &= (budget > 0) & ~scheduler.is_stalled
    return once(may_admit, lambda s: _admit(s, config, budget), scheduler)


def retire(scheduler: Scheduler) -> Scheduler:
    """Take back the slots and the blocks of requests that have ended."""
    ends = scheduler.is_running & (scheduler.requests.status[scheduler.running] >= Status.STOP)
    return once(jnp.any(ends), lambda s: vacate(s, ends), scheduler)


def share(scheduler: Scheduler, is_new: jax.Array) -> Scheduler:
    """Let later prompts find what the slots `is_new`, bool [S], have computed, where there is an index."""
    if scheduler.cache.index is None:
        return scheduler
    slots = jnp.arange(is_new.shape[0], dtype=jnp.int32)
    request = scheduler.running

    def commit(cache: PagedKVCache) -> PagedKVCache:
        return cache.commit(
            jnp.where(is_new, slots, -1),
            scheduler.requests.tokens[request],
            jnp.where(is_new, scheduler.num_computed, 0),
            scheduler.requests.salt[request],
        )[0]

    return dataclasses.replace(scheduler, cache=once(jnp.any(is_new), commit, scheduler.cache))


def requeue(scheduler: Scheduler, slot: jax.Array, status: Status) -> Scheduler:
    """Take the request whose blocks are gone out of `slot`, int32 [], back to the head of the queue."""
    request, requests = scheduler.slot_request[slot], scheduler.requests
    start = (scheduler.queue_start - 1) % scheduler.queue.shape[0]
    return dataclasses.replace(
        scheduler,
        slot_request=scheduler.slot_request.at[slot].set(-1),
        num_computed=scheduler.num_computed.at[slot].set(0),
        requests=dataclasses.replace(
            requests, status=requests.status.at[request].set(jnp.int32(status))
        ),
        queue=scheduler.queue.at[start].set(request),
        queue_start=start,
        queue_len=scheduler.queue_len + 1,
    )


def youngest(scheduler: Scheduler) -> jax.Array:
    """int32 [], the slot of the running request that arrived last."""
    arrival = scheduler.requests.arrival[scheduler.running]
    return jnp.argmax(jnp.where(scheduler.is_running, arrival, -1)).astype(jnp.int32)


def once(condition: jax.Array, function: Callable[[T], T], carry: T) -> T:
    """`function(carry)` if `condition`, bool [], else `carry`.

    A loop that runs once or not at all: unlike a conditional, it updates its arrays in place.
    """
    return jax.lax.while_loop(
        lambda state: state[0],
        lambda state: (jnp.bool(False), function(state[1])),
        (condition, carry),
    )[1]


def _lacks_room(scheduler: Scheduler) -> jax.Array:
    """bool [S], the slots whose sequence has no room yet for its request's last token."""
    room = scheduler.cache.state.seq_lens
    return scheduler.is_running & (room < scheduler.requests.lens[scheduler.running])


def _blocks_needed(scheduler: Scheduler) -> jax.Array:
    """int32 [], blocks that the running requests' last tokens need."""
    state = scheduler.cache.state
    is_full = state.seq_lens % state.block_size == 0
    return jnp.sum(_lacks_room(scheduler) & is_full, dtype=jnp.int32)


def _most_blocks(scheduler: Scheduler, request: jax.Array, block_size: int) -> jax.Array:
    """int32, shape of `request`: blocks it holds at its end; the last token is never written."""
    requests = scheduler.requests
    most_tokens = requests.prompt_lens[request] + requests.max_new_tokens[request] - 1
    return -(-most_tokens // block_size)


def _evict(scheduler: Scheduler) -> Scheduler:
    """Make room for what is needed from what only the index holds, as far as that goes."""
    cache = scheduler.cache
    assert cache.index is not None
    # One row a block: as many as can be served.
    needed = jnp.arange(scheduler.slot_request.shape[0]) < _blocks_needed(scheduler)
    index, state = make_room(cache.index, cache.state, needed)
    return dataclasses.replace(
        scheduler, cache=dataclasses.replace(cache, index=index, state=state)
    )


def _preempt_youngest(scheduler: Scheduler) -> Scheduler:
    slot = youngest(scheduler)
    cache, _ = scheduler.cache.free(slot[None])
    counts = scheduler.counts
    counts = dataclasses.replace(counts, preemptions=counts.preemptions + 1)
    scheduler = dataclasses.replace(scheduler, cache=cache, counts=counts)
    scheduler = requeue(scheduler, slot, Status.WAITING)
    # What it held may be what the index holds as well, and can be evicted now.
    return scheduler if scheduler.cache.index is None else _evict(scheduler)


def _admit(scheduler: Scheduler, config: ServingConfig, budget: jax.Array) -> Scheduler:
    cache, requests = scheduler.cache, scheduler.requests
    num_rows = min(config.max_admissions, config.cache.max_seqs, config.max_requests)
    nth = jnp.arange(num_rows, dtype=jnp.int32)
    request = scheduler.waiting[:num_rows]
    (slot,) = jnp.nonzero(~scheduler.is_running, size=num_rows, fill_value=-1)
    slot = slot.astype(jnp.int32)
    lens, tokens, salt = requests.lens[request], requests.tokens[request], requests.salt[request]

    # All of a prompt but its last token, whose logits are needed, can be forked from a sample of it.
    shared = requests.prompt_lens[request] - 1
    group = requests.group[request]
    is_sibling = requests.group[scheduler.running] == group[:, None]
    is_sibling &= scheduler.is_running & (shared > 0)[:, None]  # [A, S]
    is_parent = is_sibling & (scheduler.num_computed >= shared[:, None])
    forks = jnp.any(is_parent, axis=1)
    parent = jnp.argmax(is_parent, axis=1).astype(jnp.int32)
    follows = jnp.any((group == group[:, None]) & (nth < nth[:, None]), axis=1) & (shared > 0)
    waits = (jnp.any(is_sibling, axis=1) | follows) & ~forks

    found, found_idle = jnp.zeros_like(lens), jnp.zeros_like(lens)
    free_blocks = cache.state.free_top
    if cache.index is not None:
        blocks, found = match_prefix(cache.index, tokens, jnp.where(forks, 0, lens), salt)
        is_idle = (blocks >= 0) & (cache.state.ref_count[jnp.maximum(blocks, 0)] == 1)
        found_idle = jnp.sum(is_idle, axis=1, dtype=jnp.int32)
        free_blocks += jnp.sum(idle_blocks(cache.index, cache.state), dtype=jnp.int32)
    present = jnp.where(forks, shared, found)  # tokens that need not be computed
    rest = lens - present
    block_size = config.cache.block_size
    needed = -(-lens // block_size) - present // block_size

    in_order = jnp.cumsum(needed + found_idle, dtype=jnp.int32)
    may_grow = _most_blocks(scheduler, request, block_size) > -(-lens // block_size)
    running_may_grow = scheduler.is_running & (
        _most_blocks(scheduler, scheduler.running, block_size) > cache.state.seq_block_count
    )
    reserved = jnp.sum(running_may_grow, dtype=jnp.int32) + jnp.cumsum(may_grow, dtype=jnp.int32)
    enters = (nth < scheduler.queue_len) & (requests.status[request] == Status.WAITING)
    enters &= (slot >= 0) & ~waits
    enters &= jnp.cumsum(rest, dtype=jnp.int32) - rest < budget
    enters &= in_order + reserved <= free_blocks
    enters = jnp.cumprod(enters, dtype=jnp.int32) > 0

    starts = jnp.where(enters & ~forks, slot, -1)
    if cache.index is None:
        cache, _ = cache.allocate(starts, lens)
    else:
        cache, _, found = cache.admit(starts, tokens, lens, salt)
        present = jnp.where(forks, shared, found)
    children = jnp.where(enters & forks, slot, -1)
    cache, _ = cache.fork(jnp.where(children >= 0, parent, -1), children, shared)
    cache, _ = cache.append(children, rest)

    num_entered = jnp.sum(enters, dtype=jnp.int32)
    into = jnp.where(enters, slot, scheduler.slot_request.shape[0])
    entered = jnp.where(enters, request, config.max_requests)
    return dataclasses.replace(
        scheduler,
        cache=cache,
        requests=dataclasses.replace(
            requests,
            status=requests.status.at[entered].set(jnp.int32(Status.RUNNING), mode="drop"),
        ),
        slot_request=scheduler.slot_request.at[into].set(request, mode="drop"),
        num_computed=scheduler.num_computed.at[into].set(present, mode="drop"),
        queue_start=(scheduler.queue_start + num_entered) % config.max_requests,
        queue_len=scheduler.queue_len - num_entered,
    )
