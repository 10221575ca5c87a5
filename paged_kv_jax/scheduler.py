"""The scheduler as a pytree: requests, the queue they wait in, and the slots they run in.

A request is a row of tokens, its prompt and then its output, of which some are computed, that is, have
their keys and values in the cache. A step computes more of them; where it computes the last one, the
next token is chosen and appended. Nothing else tells a prompt from an output, so that a request that
lost its blocks goes on as if its output had been part of its prompt. (Iteration-level scheduling is
Orca's, Yu et al., 2022; chunks of prompts among decode rows are Sarathi's, Agrawal et al., 2023.)

Here are the static sizes, the state, and what the host asks of it between compiled steps: `submit` and
`cancel`. Which requests get blocks is decided in `admission`, the step itself is in `serving`.
"""

import dataclasses
import enum
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.cache import PagedKVCache
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import ResultCode
from paged_kv_jax.sampling import Sampling, SamplingRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Everything that is static about serving; hashable. Nothing that requests bring compiles anew.

    Attributes:
      cache: geometry of the cache; its `max_seqs` S is the number of slots, and a request has at most
        `max_seq_len` + 1 tokens, as the last one is never written.
      max_requests: R, requests on the device at once, waiting or running.
      mixed_sizes: token places T of the batches that may hold chunks of prompts, each compiled; a step
        takes the smallest that holds what there is to compute, and the largest is a step's budget of
        tokens, at least S.
      decode_sizes: rows of the batches in which each row computes one token, each compiled; a step
        takes the smallest that holds its rows. S is always one of them. On a CPU, where a row costs
        time whether it is used or not, more sizes pay.
      max_stop_tokens: X, stop tokens a request may have.
      max_admissions: A, requests that may be admitted in one step.
      prefix_reuse: keep what prompts and outputs have written, to be found by later prompts.
      swaps: on a shortage of blocks leave preemption to the host, which moves the youngest request into
        host memory; otherwise it is preempted in the compiled step and computed again later.

    Raises:
      ValueError: a field has a value that cannot work; the message names it.
    """

    cache: KVCacheConfig
    max_requests: int
    mixed_sizes: tuple[int, ...] = (512,)
    decode_sizes: tuple[int, ...] = ()
    max_stop_tokens: int = 4
    max_admissions: int = 8
    prefix_reuse: bool = False
    swaps: bool = False

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_stop_tokens", "max_admissions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1")
        num_slots = self.cache.max_seqs
        for name in ("mixed_sizes", "decode_sizes"):
            sizes = tuple(sorted(set(getattr(self, name))))
            if any(not isinstance(size, int) or size < 1 for size in sizes):
                raise ValueError(f"{name}={sizes} must be ints of at least 1")
            object.__setattr__(self, name, sizes)
        if not self.mixed_sizes or self.mixed_sizes[-1] < num_slots:
            raise ValueError(
                f"mixed_sizes={self.mixed_sizes} must have one of at least cache.max_seqs={num_slots}, "
                "so that every row can decode in a step that also takes prompts"
            )
        if self.decode_sizes and self.decode_sizes[-1] > num_slots:
            raise ValueError(
                f"decode_sizes={self.decode_sizes} must not pass cache.max_seqs={num_slots} rows"
            )
        object.__setattr__(
            self, "decode_sizes", tuple(sorted({*self.decode_sizes, self.cache.max_seqs}))
        )

    @property
    def max_len(self) -> int:
        """C, tokens of a prompt and its output."""
        return self.cache.max_seq_len + 1

    @property
    def max_step_tokens(self) -> int:
        """The budget of tokens that one step computes."""
        return self.mixed_sizes[-1]


class Status(enum.IntEnum):
    """Where a request is; from STOP on it has ended, and its entry may be submitted to again."""

    EMPTY = 0
    WAITING = 1
    RUNNING = 2
    SWAPPED = 3
    """It waits in host memory."""
    STOP = 4
    """It chose one of its stop tokens."""
    LENGTH = 5
    """It has its number of new tokens."""
    CANCELLED = 6
    REFUSED = 7
    """It could never be served."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self >= Status.STOP


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "tokens", "lens", "prompt_lens", "max_new_tokens", "status", "arrival", "group", "salt", "seed",
        "stop_tokens", "sampling",
    ),
    meta_fields=(),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """R requests. A pytree of arrays; all but `tokens` is small.

    Attributes:
      tokens: int32 [R, C], prompt and output, a stop token included.
      lens: int32 [R], how many tokens there are.
      prompt_lens: int32 [R], how many of them are the prompt's.
      max_new_tokens: int32 [R].
      status: int32 [R], a `Status`.
      arrival: int32 [R], the order in which requests came; what came later is preempted first.
      group: int32 [R], equal for the samples of one prompt, which fork from each other.
      salt: int32 [R], only prompts of equal salt reuse each other's blocks.
      seed: int32 [R], of the random choices.
      stop_tokens: int32 [R, X], -1 where there is none.
      sampling: how tokens are chosen, [R] each.
    """

    tokens: jax.Array
    lens: jax.Array
    prompt_lens: jax.Array
    max_new_tokens: jax.Array
    status: jax.Array
    arrival: jax.Array
    group: jax.Array
    salt: jax.Array
    seed: jax.Array
    stop_tokens: jax.Array
    sampling: SamplingRows

    @classmethod
    def empty(cls, config: ServingConfig, num_requests: int) -> Self:
        """Requests that ask for nothing."""
        names = (
            "lens", "prompt_lens", "max_new_tokens", "status", "arrival", "group", "salt", "seed",
        )  # fmt: skip
        return cls(
            tokens=jnp.zeros((num_requests, config.max_len), jnp.int32),
            # An array for each, as a donated one may stand in one place only.
            **{name: jnp.zeros(num_requests, jnp.int32) for name in names},
            stop_tokens=jnp.full((num_requests, config.max_stop_tokens), -1, jnp.int32),
            sampling=SamplingRows.of(Sampling(), num_requests),
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "steps", "mixed_steps", "computed_tokens", "new_tokens", "preemptions", "peak_blocks",
    ),
    meta_fields=(),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Counts:
    """What one call of `run_until` did; int32 [] each.

    Attributes:
      steps: steps taken.
      mixed_steps: those whose batch held a chunk of a prompt.
      computed_tokens: tokens whose keys and values were computed, again or for the first time.
      new_tokens: tokens chosen.
      preemptions: requests that lost their blocks.
      peak_blocks: the most blocks that were in use at once, those that only the index holds included.
    """

    steps: jax.Array
    mixed_steps: jax.Array
    computed_tokens: jax.Array
    new_tokens: jax.Array
    preemptions: jax.Array
    peak_blocks: jax.Array

    @classmethod
    def zero(cls) -> Self:
        """Nothing done yet."""
        return cls(*(jnp.int32(0) for _ in dataclasses.fields(cls)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "cache", "requests", "slot_request", "num_computed", "queue", "queue_start", "queue_len",
        "is_stalled", "counts",
    ),
    meta_fields=(),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Scheduler:
    """All that serving knows, on the device. The sequence of a slot is the cache's of the same number.

    Always holds between steps:
      * a request is in a slot exactly if it is RUNNING, and in the queue exactly if it is WAITING or
        SWAPPED; the queue is in order of arrival, and all that is in it arrived after all that runs;
      * `num_computed` is below the request's length, and the slot's sequence has room for that many
        tokens, or one less, which the next step adds.

    Attributes:
      cache: the paged cache.
      requests: R of them.
      slot_request: int32 [S], the request in each slot; -1 for a free slot.
      num_computed: int32 [S], tokens of the request that are in the cache.
      queue: int32 [R], a ring of the requests that wait: `queue[(queue_start + i) % R]`.
      queue_start, queue_len: int32 [].
      is_stalled: bool [], the next step needs blocks that only the host can free (`config.swaps`).
      counts: what the current `run_until` did.
    """

    cache: PagedKVCache
    requests: Requests
    slot_request: jax.Array
    num_computed: jax.Array
    queue: jax.Array
    queue_start: jax.Array
    queue_len: jax.Array
    is_stalled: jax.Array
    counts: Counts

    @classmethod
    def create(cls, config: ServingConfig) -> Self:
        """A scheduler without requests, and its cache."""
        return cls(
            cache=PagedKVCache.create(config.cache, prefix_reuse=config.prefix_reuse),
            requests=Requests.empty(config, config.max_requests),
            slot_request=jnp.full(config.cache.max_seqs, -1, jnp.int32),
            num_computed=jnp.zeros(config.cache.max_seqs, jnp.int32),
            queue=jnp.zeros(config.max_requests, jnp.int32),
            queue_start=jnp.int32(0),
            queue_len=jnp.int32(0),
            is_stalled=jnp.bool(False),
            counts=Counts.zero(),
        )

    @property
    def errors(self) -> jax.Array:
        """int32 [], the cache's sticky word."""
        return self.cache.errors

    @property
    def is_running(self) -> jax.Array:
        """bool [S], the slots that hold a request."""
        return self.slot_request >= 0

    @property
    def running(self) -> jax.Array:
        """int32 [S], the request in each slot; 0, to gather with, in a free one."""
        return jnp.maximum(self.slot_request, 0)

    @property
    def waiting(self) -> jax.Array:
        """int32 [R], the requests that wait, in order; what stands beyond `queue_len` is of no use."""
        nth = jnp.arange(self.queue.shape[0], dtype=jnp.int32)
        return self.queue[(self.queue_start + nth) % self.queue.shape[0]]


def refusal(config: KVCacheConfig, prompt_lens: Any, max_new_tokens: Any, xp: Any = jnp) -> Any:
    """Why requests could never be served, whatever else runs: 0 or a `ResultCode`.

    Args:
      config: the cache's geometry.
      prompt_lens, max_new_tokens: int32, of one shape.
      xp: `jax.numpy`, or `numpy` for an answer on the host.

    Returns:
      0; SEQ_TOO_LONG (-3), prompt and output pass what a sequence may hold; OUT_OF_BLOCKS (-1), they
      pass the whole pool; INVALID_COUNT (-5), an empty prompt, or no new token asked for.
    """
    # The last token is chosen but never written. Compared by subtraction: sums may pass 2^31.
    is_too_long, passes_pool = (
        prompt_lens > num_tokens + 1 - max_new_tokens
        for num_tokens in (config.max_seq_len, config.token_capacity)
    )
    code = xp.where(passes_pool, int(ResultCode.OUT_OF_BLOCKS), 0)
    code = xp.where(is_too_long, int(ResultCode.SEQ_TOO_LONG), code)
    is_count = (prompt_lens >= 1) & (max_new_tokens >= 1)
    return xp.where(is_count, code, int(ResultCode.INVALID_COUNT))


def submit(scheduler: Scheduler, ids: jax.Array, new: Requests) -> tuple[Scheduler, jax.Array]:
    """Put requests at the end of the queue. Jittable; for the host, between steps.

    Args:
      scheduler: the scheduler.
      ids: int32 [B], entries that are empty or have ended, each at most once; -1 for a padding row.
      new: B requests in order of arrival; `lens` and `status` are not looked at.

    Returns:
      The new scheduler, and int32 [B]: 0 (for a padding row, too); what `refusal` says, with which the
      request's status is REFUSED; or INVALID_SEQ (-2), an id out of range or in use: nothing changes.
    """
    requests, config = scheduler.requests, scheduler.cache.config
    num_requests = requests.lens.shape[0]
    is_valid = (ids >= 0) & (ids < num_requests)
    status = requests.status[jnp.where(is_valid, ids, 0)]
    is_valid &= (status == Status.EMPTY) | (status >= Status.STOP)
    code = refusal(config, new.prompt_lens, new.max_new_tokens)
    code = jnp.where(is_valid, code, ResultCode.INVALID_SEQ)
    code = jnp.where(ids == -1, 0, code).astype(jnp.int32)

    waits = (ids >= 0) & (code == 0)
    nth = jnp.cumsum(waits, dtype=jnp.int32) - 1
    place = (scheduler.queue_start + scheduler.queue_len + nth) % num_requests
    new = dataclasses.replace(
        new,
        lens=new.prompt_lens,
        status=jnp.where(waits, Status.WAITING, Status.REFUSED).astype(jnp.int32),
    )
    row = jnp.where(is_valid, ids, num_requests)
    return dataclasses.replace(
        scheduler,
        requests=jax.tree.map(
            lambda old, x: old.at[row].set(x.astype(old.dtype), mode="drop"), requests, new
        ),
        queue=scheduler.queue.at[jnp.where(waits, place, num_requests)].set(ids, mode="drop"),
        queue_len=scheduler.queue_len + jnp.sum(waits, dtype=jnp.int32),
    ), code


def cancel(scheduler: Scheduler, is_cancelled: jax.Array) -> Scheduler:
    """End requests that wait or run; their blocks go back at once. Jittable; for the host.

    Args:
      scheduler: the scheduler.
      is_cancelled: bool [R]; what has ended stays as it ended.
    """
    requests = scheduler.requests
    is_live = (requests.status > Status.EMPTY) & (requests.status < Status.STOP)
    ends = is_live & is_cancelled
    status = jnp.where(ends, Status.CANCELLED, requests.status).astype(jnp.int32)

    waiting, num_requests = scheduler.waiting, status.shape[0]
    stays = (jnp.arange(num_requests) < scheduler.queue_len) & ~ends[waiting]
    place = jnp.where(stays, jnp.cumsum(stays) - 1, num_requests)
    scheduler = dataclasses.replace(
        scheduler,
        requests=dataclasses.replace(requests, status=status),
        queue=jnp.zeros_like(scheduler.queue).at[place].set(waiting, mode="drop"),
        queue_start=jnp.int32(0),
        queue_len=jnp.sum(stays, dtype=jnp.int32),
    )
    return vacate(scheduler, scheduler.is_running & ends[scheduler.running])


def vacate(scheduler: Scheduler, leaves: jax.Array) -> Scheduler:
    """Empty the slots `leaves`, bool [S], and give their sequences' blocks back."""
    slots = jnp.arange(leaves.shape[0], dtype=jnp.int32)
    cache, _ = scheduler.cache.free(jnp.where(leaves, slots, -1))
    return dataclasses.replace(
        scheduler,
        cache=cache,
        slot_request=jnp.where(leaves, -1, scheduler.slot_request),
        num_computed=jnp.where(leaves, 0, scheduler.num_computed),
    )


def check_scheduler(scheduler: Scheduler) -> list[str]:
    """Which invariants of `Scheduler` are broken, in words; empty if none. For the host only."""
    requests, broken = scheduler.requests, []
    status, lens, arrival = (
        np.asarray(getattr(requests, name)) for name in ("status", "lens", "arrival")
    )
    slots = np.asarray(scheduler.slot_request)
    running = slots[slots >= 0]
    waiting = np.asarray(scheduler.waiting)[: int(scheduler.queue_len)]
    if not np.array_equal(np.sort(running), np.flatnonzero(status == Status.RUNNING)):
        broken.append("what is in the slots is not what is RUNNING")
    waits = (status == Status.WAITING) | (status == Status.SWAPPED)
    if not np.array_equal(np.sort(waiting), np.flatnonzero(waits)):
        broken.append("what is in the queue is not what is WAITING or SWAPPED")
    if np.any(np.diff(arrival[waiting]) <= 0):
        broken.append("the queue is not in order of arrival")
    if len(running) and len(waiting) and arrival[running].max() > arrival[waiting].min():
        broken.append("a request runs that arrived after one that waits")
    computed = np.asarray(scheduler.num_computed)[slots >= 0]
    room = np.asarray(scheduler.cache.state.seq_lens)
    if np.any(computed >= lens[running]):
        broken.append("a running request has nothing left to compute")
    if np.any((room[slots >= 0] != lens[running]) & (room[slots >= 0] != lens[running] - 1)):
        broken.append("a slot's sequence has not the room that its request needs")
    if np.any(room[slots < 0] > 0):
        broken.append("a free slot's sequence holds blocks")
    return broken
