"""Continuous batching in one compiled program: `serve_step`, and `run_until` in a `lax.while_loop`.

A step: running requests grow (the youngest are preempted on a shortage), waiting ones are admitted, a
batch is planned, the model computes it, tokens are chosen and recorded, what has ended is retired. The
batch is one of a few static sizes. Where no row computes more than one token it is a decode batch, with
a row for each; else it is one ragged batch, the decoding rows first, then chunks of prompts, older
requests first, as far as the token places go. Only each row's last token goes through the logits.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paged_kv_jax.admission import admit, grow, once, retire, share
from paged_kv_jax.plan import Plan, plan_from_tables
from paged_kv_jax.pool import KVPool
from paged_kv_jax.sampling import penalise_repetition, sample
from paged_kv_jax.scheduler import Counts, Scheduler, ServingConfig, Status


class LanguageModel(Protocol):
    """A model over a paged cache; a pytree, so that it is an argument of compiled functions."""

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, pool: KVPool, plan: Plan
    ) -> tuple[jax.Array, KVPool]:
        """tokens, positions int32 [T] -> hidden [T, E] and the pool with their K and V written."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., E] -> float32 [..., V]."""
        ...


@functools.partial(jax.jit, static_argnames="config", donate_argnames="scheduler")
def run_until(
    model: LanguageModel, scheduler: Scheduler, config: ServingConfig, num_steps: jax.Array | int
) -> Scheduler:
    """Steps until all requests have ended, or only the host can go on, or `num_steps` are done.

    Args:
      model: the model.
      scheduler: donated.
      config: as the scheduler was created with (static).
      num_steps: int32 [].

    Returns:
      The scheduler; its `counts` are of this call.
    """

    def goes_on(scheduler: Scheduler) -> jax.Array:
        first = scheduler.queue[scheduler.queue_start]
        may_start = (scheduler.queue_len > 0) & (scheduler.requests.status[first] == Status.WAITING)
        has_work = jnp.any(scheduler.is_running) | may_start
        return (scheduler.counts.steps < num_steps) & has_work & ~scheduler.is_stalled

    scheduler = dataclasses.replace(scheduler, counts=Counts.zero(), is_stalled=jnp.bool(False))
    return jax.lax.while_loop(
        goes_on, lambda scheduler: serve_step(model, scheduler, config), scheduler
    )


def serve_step(model: LanguageModel, scheduler: Scheduler, config: ServingConfig) -> Scheduler:
    """One step of all that runs. Pure and jittable; see the module.

    Args:
      model: the model.
      scheduler: the scheduler.
      config: as the scheduler was created with (static).
    """
    scheduler = grow(scheduler, config)
    scheduler = admit(scheduler, config)
    batch = plan_batch(scheduler, config)
    cache = scheduler.cache
    carry = (cache.pool, cache.state.errors, jnp.zeros_like(scheduler.slot_request))
    for nth, size in enumerate(config.decode_sizes + config.mixed_sizes):
        is_decode = nth < len(config.decode_sizes)
        compute = functools.partial(
            _compute, model, scheduler, batch, size=size, is_decode=is_decode
        )
        carry = once(batch.size_index == nth, compute, carry)
    pool, errors, chosen = carry
    state = dataclasses.replace(cache.state, errors=errors)
    scheduler = dataclasses.replace(
        scheduler, cache=dataclasses.replace(cache, pool=pool, state=state)
    )
    scheduler = record(scheduler, batch, chosen, config)
    return retire(scheduler)


class StepBatch(NamedTuple):
    """What a step computes.

    Attributes:
      slots: int32 [S], all slots: first those that compute one token, then those that compute more,
        then those that compute none; older requests first.
      q_lens: int32 [S], tokens that each of `slots` computes.
      size_index: int32 [], which of `decode_sizes + mixed_sizes`; -1 where there is nothing to do.
    """

    slots: jax.Array
    q_lens: jax.Array
    size_index: jax.Array


def plan_batch(scheduler: Scheduler, config: ServingConfig) -> StepBatch:
    """Which tokens the step computes: one of each decoding row, then of prompts what the budget allows."""
    requests, request = scheduler.requests, scheduler.running
    # What has no room for its last token, as only the host can make it, sits this step out.
    takes_part = scheduler.is_running & (scheduler.cache.state.seq_lens >= requests.lens[request])
    wanted = jnp.where(takes_part, requests.lens[request] - scheduler.num_computed, 0)
    rank = jnp.where(wanted == 0, 2, jnp.where(wanted == 1, 0, 1))
    slots = jnp.lexsort((requests.arrival[request], rank)).astype(jnp.int32)
    wanted = wanted[slots]
    before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
    q_lens = jnp.clip(config.max_step_tokens - before, 0, wanted)

    num_tokens, num_rows = jnp.sum(q_lens), jnp.sum(q_lens > 0)
    is_decode = jnp.max(q_lens) <= 1
    nth_decode = jnp.sum(jnp.array(config.decode_sizes) < num_rows)
    nth_mixed = jnp.sum(jnp.array(config.mixed_sizes) < num_tokens)
    index = jnp.where(is_decode, nth_decode, len(config.decode_sizes) + nth_mixed)
    return StepBatch(slots, q_lens, jnp.where(num_tokens > 0, index, -1).astype(jnp.int32))


def record(
    scheduler: Scheduler, batch: StepBatch, chosen: jax.Array, config: ServingConfig
) -> Scheduler:
    """Take down what a step computed and the tokens it chose.

    Args:
      scheduler: the scheduler.
      batch: what was computed.
      chosen: int32 [S], the token chosen for each slot, where its last token was computed.
      config: the sizes.
    """
    requests, request = scheduler.requests, scheduler.running
    q_lens = jnp.zeros_like(batch.q_lens).at[batch.slots].set(batch.q_lens)
    num_computed = scheduler.num_computed + q_lens
    lens = requests.lens[request]
    chooses = (q_lens > 0) & (num_computed == lens)
    row = jnp.where(chooses, request, config.max_requests)
    stops = jnp.any(chosen[:, None] == requests.stop_tokens[request], axis=1)
    is_full = lens + 1 - requests.prompt_lens[request] >= requests.max_new_tokens[request]
    status = jnp.where(is_full, Status.LENGTH, Status.RUNNING)
    status = jnp.where(stops, Status.STOP, status).astype(jnp.int32)
    counts = scheduler.counts
    used_blocks = config.cache.num_blocks - scheduler.cache.state.free_top
    scheduler = dataclasses.replace(
        scheduler,
        num_computed=num_computed,
        requests=dataclasses.replace(
            requests,
            tokens=requests.tokens.at[row, lens].set(chosen, mode="drop"),
            lens=requests.lens.at[row].add(1, mode="drop"),
            status=requests.status.at[row].set(status, mode="drop"),
        ),
        counts=dataclasses.replace(
            counts,
            steps=counts.steps + 1,
            mixed_steps=counts.mixed_steps + (jnp.max(q_lens) > 1).astype(jnp.int32),
            computed_tokens=counts.computed_tokens + jnp.sum(q_lens),
            new_tokens=counts.new_tokens + jnp.sum(chooses, dtype=jnp.int32),
            peak_blocks=jnp.maximum(counts.peak_blocks, used_blocks),
        ),
    )
    return share(scheduler, (q_lens > 1) | (chooses & (status >= Status.STOP)))


def _compute(
    model: LanguageModel,
    scheduler: Scheduler,
    batch: StepBatch,
    carry: tuple[KVPool, jax.Array, jax.Array],
    *,
    size: int,
    is_decode: bool,
) -> tuple[KVPool, jax.Array, jax.Array]:
    """The model over a batch of `size` rows of one token each, or of `size` token places.

    Takes and returns the pool, the sticky word, and int32 [S], the tokens chosen for each slot.
    """
    pool, errors, chosen = carry
    state, requests = scheduler.cache.state, scheduler.requests
    slots, q_lens = batch.slots, batch.q_lens
    if is_decode:
        slots, q_lens = slots[:size], q_lens[:size]
    request = scheduler.running[slots]
    kv_lens = jnp.where(q_lens > 0, scheduler.num_computed[slots] + q_lens, 0)
    plan = plan_from_tables(
        state.block_table[slots],
        kv_lens,
        1 if is_decode else q_lens,
        block_size=state.block_size,
        num_tokens=None if is_decode else size,
    )
    tokens = requests.tokens[request[jnp.maximum(plan.token_rows, 0)], plan.positions]
    hidden, pool = model(tokens, plan.positions, pool, plan)
    logits = model.logits(hidden[plan.last_tokens])

    lens, options = requests.lens[request], jax.tree.map(lambda x: x[request], requests.sampling)
    logits = penalise_repetition(logits, options.repetition_penalty, requests.tokens[request], lens)
    # A token's key is the request's with the token's place in the output folded in: it depends
    # neither on the batch nor on what was computed how often.
    keys = jax.vmap(jax.random.key)(requests.seed[request])
    options = dataclasses.replace(
        options, temperature=jnp.where(q_lens > 0, options.temperature, 0)
    )
    token = sample(logits, keys, lens - requests.prompt_lens[request], options)
    return pool, errors | plan.errors, chosen.at[slots].set(token)
