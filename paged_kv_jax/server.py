"""Serving from the host: requests go in, tokens come out, between calls of the compiled program.

`Server` keeps a `Scheduler` on the device and runs it some steps at a time. In between it submits what
was added, cancels, reads what is new, and moves requests to host memory and back if it was asked to.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax import scheduler as scheduling
from paged_kv_jax.admission import requeue, youngest
from paged_kv_jax.errors import PagedKVError, ResultCode, raise_if_failed
from paged_kv_jax.eviction import make_room
from paged_kv_jax.sampling import Sampling, SamplingRows
from paged_kv_jax.scheduler import Requests, Scheduler, ServingConfig, Status
from paged_kv_jax.serving import LanguageModel, run_until
from paged_kv_jax.swap import HostPool, HostSequence, swap_in, swap_out

SUBMITTED_AT_ONCE = 16
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a `Server`.

    Attributes:
      prompt: token ids.
      max_new_tokens: at most that many new tokens.
      stop_tokens: token ids that end it.
      sampling: how tokens are chosen.
      seed: of the random choices; the same request with the same seed gives the same text, alone or in
        any batch. Sample i of several takes `seed + i`.
      num_samples: texts to make; the prompt is computed once for all.
      salt: only prompts of equal salt reuse each other's blocks.

    Raises:
      ValueError: a field has a value that cannot work.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    seed: int = 0
    num_samples: int = 1
    salt: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples} must be at least 1")
        if not 0 <= self.seed <= _INT32_MAX - self.num_samples:
            raise ValueError(f"seed={self.seed} must be in [0, 2^31 - num_samples)")
        if not -_INT32_MAX <= self.salt <= _INT32_MAX:
            raise ValueError(f"salt={self.salt} must be an int32")


@dataclasses.dataclass(frozen=True)
class Update:
    """What is new of one sample of a request.

    Attributes:
      request: as `Server.add` numbered it.
      sample: which of its samples, from 0.
      tokens: new tokens, without the stop token.
      finish: how it ended: STOP, LENGTH, CANCELLED or REFUSED; None while it goes on.
      refusal: why it was refused.
    """

    request: int
    sample: int
    tokens: list[int]
    finish: Status | None = None
    refusal: ResultCode | None = None


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a server has done so far: `Counts`, summed. Python ints."""

    steps: int = 0
    mixed_steps: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


@dataclasses.dataclass
class _Sample:
    """One sample of a request, from `add` until its end was handed out."""

    request: Request
    number: int
    nth: int
    arrival: int
    num_sent: int = 0


class Server:
    """Continuous batching over one model.

    Attributes:
      scheduler: all state on the device; donated by every step, so never hold on to it.
      totals: what was done so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: ServingConfig,
        *,
        steps_per_call: int = 16,
        host_blocks: int = 0,
    ):
        """A server without requests.

        Args:
          model: the model.
          config: static sizes.
          steps_per_call: steps between two looks of the host.
          host_blocks: with `config.swaps`, blocks of host memory for preempted requests; those for
            which it has no room are computed again.

        Raises:
          ValueError: an argument cannot work.
        """
        if steps_per_call < 1:
            raise ValueError(f"steps_per_call={steps_per_call} must be at least 1")
        if config.swaps != (host_blocks > 0):
            raise ValueError(
                f"host_blocks={host_blocks} must be above 0 exactly if config.swaps={config.swaps}"
            )
        self.scheduler = Scheduler.create(config)
        self.totals = Totals()
        self._model, self._config, self._steps_per_call = model, config, steps_per_call
        self._host_blocks = host_blocks
        self._swapped: dict[int, tuple[HostSequence, int]] = {}  # by entry, with num_computed
        self._num_requests = self._num_samples = 0
        self._pending: collections.deque[_Sample] = collections.deque()  # not on the device yet
        self._on_device: dict[int, _Sample] = {}  # by entry
        self._free_entries = collections.deque(range(config.max_requests))
        self._updates: list[Update] = []

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and was handed out."""
        return not (self._pending or self._on_device or self._updates)

    def add(self, request: Request) -> int:
        """Queue a request; the number it has in updates. What can never be served ends at once.

        Raises:
          ValueError: it has more stop tokens than `config.max_stop_tokens`, or a token id that is none.
        """
        if len(request.stop_tokens) > self._config.max_stop_tokens:
            raise ValueError(
                f"the request has {len(request.stop_tokens)} stop tokens; max_stop_tokens="
                f"{self._config.max_stop_tokens}"
            )
        for name in ("prompt", "stop_tokens"):
            if any(not 0 <= token <= _INT32_MAX for token in getattr(request, name)):
                raise ValueError(f"{name} holds an id outside [0, 2^31)")
        number, self._num_requests = self._num_requests, self._num_requests + 1
        code = int(
            scheduling.refusal(
                self._config.cache, len(request.prompt), request.max_new_tokens, xp=np
            )
        )
        for nth in range(request.num_samples):
            if code:
                refusal = ResultCode(code)
                self._updates.append(Update(number, nth, [], Status.REFUSED, refusal))
            else:
                self._pending.append(_Sample(request, number, nth, self._num_samples))
                self._num_samples += 1
        return number

    def cancel(self, number: int) -> None:
        """End a request, all its samples; nothing happens if it has ended."""
        for sample in [sample for sample in self._pending if sample.number == number]:
            self._pending.remove(sample)
            self._updates.append(Update(number, sample.nth, [], Status.CANCELLED))
        is_cancelled = np.zeros(self._config.max_requests, bool)
        entries = [entry for entry, s in self._on_device.items() if s.number == number]
        is_cancelled[entries] = True
        if entries:
            self.scheduler = _cancel(self.scheduler, is_cancelled)
            for entry in entries:
                self._swapped.pop(entry, None)

    def warm_up(self) -> None:
        """Compile everything now that steps and cancellations need."""
        self._submit([])
        self.scheduler = _cancel(self.scheduler, np.zeros(self._config.max_requests, bool))
        self.scheduler = run_until(self._model, self.scheduler, self._config, 0)
        jax.block_until_ready(self.scheduler)

    def step(self) -> list[Update]:
        """Run the compiled program once, at most `steps_per_call` steps; what is new since the last.

        Raises:
          PagedKVError: an operation of the cache failed, which is a fault.
        """
        self._fill()
        if self._on_device:
            if self._config.swaps:
                self._swap_in()
            self.scheduler = run_until(
                self._model, self.scheduler, self._config, self._steps_per_call
            )
            raise_if_failed(self.scheduler)
            self._count()
            self._drain()
            if self._config.swaps and bool(self.scheduler.is_stalled):
                self._swap_out()
        updates, self._updates = self._updates, []
        return updates

    def stream(self) -> Iterator[Update]:
        """Updates as they come, until the server is idle."""
        while not self.is_idle:
            yield from self.step()

    def run(self) -> dict[tuple[int, int], Update]:
        """Run until the server is idle: for each (request, sample) one update with all its tokens."""
        tokens: dict[tuple[int, int], list[int]] = {}
        results = {}
        for update in self.stream():
            key = update.request, update.sample
            tokens.setdefault(key, []).extend(update.tokens)
            if update.finish is not None:
                results[key] = dataclasses.replace(update, tokens=tokens.pop(key))
        return results

    def _fill(self) -> None:
        """Submit what is pending while entries are free."""
        while self._pending and self._free_entries:
            count = min(SUBMITTED_AT_ONCE, len(self._pending), len(self._free_entries))
            self._submit([self._pending.popleft() for _ in range(count)])

    def _submit(self, samples: list[_Sample]) -> None:
        config, num_rows = self._config, SUBMITTED_AT_ONCE
        ids = np.full(num_rows, -1, np.int32)
        tokens = np.zeros((num_rows, config.max_len), np.int32)
        stop_tokens = np.full((num_rows, config.max_stop_tokens), -1, np.int32)
        ints = np.zeros((6, num_rows), np.int32)
        floats = np.zeros((5, num_rows), np.float32)
        for row, sample in enumerate(samples):
            request, options = sample.request, sample.request.sampling
            entry = self._free_entries.popleft()
            self._on_device[entry] = sample
            ids[row] = entry
            tokens[row, : len(request.prompt)] = request.prompt
            stop_tokens[row, : len(request.stop_tokens)] = request.stop_tokens
            ints[:, row] = (
                len(request.prompt), request.max_new_tokens, sample.arrival,
                sample.arrival - sample.nth, request.salt, request.seed + sample.nth,
            )  # fmt: skip
            floats[:, row] = (
                options.temperature, options.top_k or 0, options.top_p, options.min_p,
                options.repetition_penalty,
            )  # fmt: skip
        self.scheduler = _submit_rows(self.scheduler, ids, tokens, stop_tokens, ints, floats)

    def _count(self) -> None:
        counts = {
            field.name: int(getattr(self.scheduler.counts, field.name))
            for field in dataclasses.fields(Totals)
        }
        done = dataclasses.asdict(self.totals)
        self.totals = Totals(
            **{
                name: max(done[name], count) if name == "peak_blocks" else done[name] + count
                for name, count in counts.items()
            }
        )

    def _drain(self) -> None:
        """Hand out what is new of each request; free the entries of those that have ended."""
        requests = self.scheduler.requests
        status, lens = np.asarray(requests.status), np.asarray(requests.lens)
        tokens = np.asarray(requests.tokens)
        for entry, sample in list(self._on_device.items()):
            start = len(sample.request.prompt) + sample.num_sent
            end, state = int(lens[entry]), Status(int(status[entry]))
            new = tokens[entry, start : end - (state == Status.STOP)].tolist()
            sample.num_sent += len(new)
            if state.has_ended:
                del self._on_device[entry]
                self._free_entries.append(entry)
            if new or state.has_ended:
                finish = state if state.has_ended else None
                self._updates.append(Update(sample.number, sample.nth, new, finish))

    def _swap_out(self) -> None:
        """Move the youngest running request to host memory, or, where that is full, make it wait."""
        scheduler, preemptions = self.scheduler, self.totals.preemptions + 1
        self.totals = dataclasses.replace(self.totals, preemptions=preemptions)
        slot = int(youngest(scheduler))
        entry, state = int(scheduler.slot_request[slot]), scheduler.cache.state
        used = sum(sequence.num_blocks for sequence, _ in self._swapped.values())
        room = self._host_blocks - used
        if int(state.seq_block_count[slot]) > room:
            self.scheduler = _give_up(scheduler, slot)
            return
        state, host, _ = swap_out(state, scheduler.cache.pool, HostPool(room), [slot])
        self._swapped[entry] = (host.sequences[slot], int(scheduler.num_computed[slot]))
        cache = dataclasses.replace(scheduler.cache, state=state)
        self.scheduler = _requeue_swapped(dataclasses.replace(scheduler, cache=cache), slot)

    def _swap_in(self) -> None:
        """Move requests back from host memory while they are first in the queue and have room."""
        while self._swapped and int(self.scheduler.queue_len):
            scheduler = self.scheduler
            entry = int(scheduler.queue[scheduler.queue_start])
            is_free = np.asarray(scheduler.slot_request) < 0
            if entry not in self._swapped or not is_free.any():
                return
            slot, (sequence, num_computed) = int(np.argmax(is_free)), self._swapped[entry]
            needed = sequence.num_blocks + int(np.sum(~is_free))  # one more for each that runs
            scheduler = self.scheduler = _make_room(scheduler, min(needed, _INT32_MAX))
            if needed > int(scheduler.cache.state.free_top):
                return
            cache = scheduler.cache
            state, pool, _, result = swap_in(
                cache.state, cache.pool, HostPool(sequence.num_blocks, {slot: sequence}),
                [slot],
            )  # fmt: skip
            if result[0] < 0:
                raise PagedKVError((ResultCode(int(result[0])),))
            del self._swapped[entry]
            cache = dataclasses.replace(cache, state=state, pool=pool)
            scheduler = dataclasses.replace(scheduler, cache=cache)
            self.scheduler = _resume(scheduler, slot, num_computed)


_cancel = jax.jit(scheduling.cancel, donate_argnums=0)


@functools.partial(jax.jit, donate_argnames="scheduler")
def _submit_rows(
    scheduler: Scheduler,
    ids: jax.Array,
    tokens: jax.Array,
    stop_tokens: jax.Array,
    ints: jax.Array,
    floats: jax.Array,
) -> Scheduler:
    prompt_lens, max_new_tokens, arrival, group, salt, seed = ints
    temperature, top_k, top_p, min_p, penalty = floats
    new = Requests(
        tokens=tokens, lens=prompt_lens, prompt_lens=prompt_lens, max_new_tokens=max_new_tokens,
        status=jnp.zeros_like(ids), arrival=arrival, group=group, salt=salt, seed=seed,
        stop_tokens=stop_tokens,
        sampling=SamplingRows(temperature, top_k.astype(jnp.int32), top_p, min_p, penalty),
    )  # fmt: skip
    return scheduling.submit(scheduler, ids, new)[0]


@functools.partial(jax.jit, donate_argnames="scheduler")
def _requeue_swapped(scheduler: Scheduler, slot: jax.Array | int) -> Scheduler:
    return requeue(scheduler, jnp.int32(slot), Status.SWAPPED)


@functools.partial(jax.jit, donate_argnames="scheduler")
def _give_up(scheduler: Scheduler, slot: jax.Array | int) -> Scheduler:
    cache, _ = scheduler.cache.free(jnp.int32(slot)[None])
    return requeue(dataclasses.replace(scheduler, cache=cache), jnp.int32(slot), Status.WAITING)


@functools.partial(jax.jit, donate_argnames="scheduler")
def _make_room(scheduler: Scheduler, needed: jax.Array | int) -> Scheduler:
    cache = scheduler.cache
    if cache.index is None:
        return scheduler
    index, state = make_room(cache.index, cache.state, jnp.int32(needed))
    return dataclasses.replace(
        scheduler, cache=dataclasses.replace(cache, index=index, state=state)
    )


@functools.partial(jax.jit, donate_argnames="scheduler")
def _resume(
    scheduler: Scheduler, slot: jax.Array | int, num_computed: jax.Array | int
) -> Scheduler:
    """Let the first in the queue run in `slot`, whose sequence is back."""
    request, requests = scheduler.queue[scheduler.queue_start], scheduler.requests
    return dataclasses.replace(
        scheduler,
        requests=dataclasses.replace(
            requests, status=requests.status.at[request].set(jnp.int32(Status.RUNNING))
        ),
        slot_request=scheduler.slot_request.at[slot].set(request),
        num_computed=scheduler.num_computed.at[slot].set(num_computed),
        queue_start=(scheduler.queue_start + 1) % scheduler.queue.shape[0],
        queue_len=scheduler.queue_len - 1,
    )
