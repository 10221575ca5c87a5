"""Text generation through a paged cache: prefill in chunks, then decode in compiled loops.

Each compiled loop (`lax.while_loop`) holds the whole step: allocator, plan, model, sampling, and the
return of a finished sequence's blocks. The host only looks between loops, to stream what is new.
Here all prompts start at once and nothing joins; `server` is for requests that come and go.
"""

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.allocator import stats
from paged_kv_jax.cache import PagedKVCache
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import ResultCode, raise_if_failed
from paged_kv_jax.sampling import Sampling, sample
from paged_kv_jax.serving import LanguageModel


class Finish(enum.IntEnum):
    """Why a sequence ended."""

    RUNNING = 0
    STOP = 1
    """It chose a stop token."""
    LENGTH = 2
    """It reached its number of new tokens."""
    OUT_OF_BLOCKS = 3
    """The pool had no block for it, or its row of the block table no column."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "cache", "seq_ids", "last_token", "outputs", "num_outputs", "finish", "keys", "peak_blocks",
    ),
    meta_fields=(),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """B sequences on their way.

    Attributes:
      cache: the paged cache.
      seq_ids: int32 [B], -1 for a row that is not, or no longer, in the cache.
      last_token: int32 [B], chosen but not yet in the cache.
      outputs: int32 [B, max_new_tokens], chosen tokens, a stop token included.
      num_outputs: int32 [B], how many of them there are.
      finish: int32 [B], a `Finish`.
      keys: typed PRNG keys [B].
      peak_blocks: int32 [], the most blocks that were in use at once.
    """

    cache: PagedKVCache
    seq_ids: jax.Array
    last_token: jax.Array
    outputs: jax.Array
    num_outputs: jax.Array
    finish: jax.Array
    keys: jax.Array
    peak_blocks: jax.Array


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock seconds; compilation is apart from the rest."""

    compile: float
    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` gives back.

    Attributes:
      tokens: new tokens of each prompt, without the stop token.
      finish: why each ended.
      peak_blocks: the most blocks that were in use at once.
      blocks_needed: blocks that let every prompt reach its last token whatever it chooses.
      timing: where the time went.
    """

    tokens: list[list[int]]
    finish: list[Finish]
    peak_blocks: int
    blocks_needed: int
    timing: Timing


def blocks_needed(prompt_lens: Sequence[int], max_new_tokens: int, block_size: int) -> int:
    """Blocks that prompts of these lengths take if each makes all its new tokens.

    The last new token is chosen but never written, so it takes no slot.
    """
    return sum(-(-(length + max_new_tokens - 1) // block_size) for length in prompt_lens)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    config: KVCacheConfig,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
    prefill_tokens: int = 512,
    steps_per_loop: int = 16,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_finish: Callable[[int], None] | None = None,
) -> Generated:
    """Continue prompts, all at once, until each chooses a stop token or has `max_new_tokens`.

    A prompt for which the pool runs out of blocks ends with `Finish.OUT_OF_BLOCKS` and keeps what it
    has; its blocks go to the others.

    Args:
      model: the model.
      prompts: token ids of each prompt, at least one token each.
      config: geometry of the cache to create; `max_seqs` at least the number of prompts.
      max_new_tokens: at most that many new tokens for each prompt.
      stop_tokens: token ids that end a sequence.
      sampling: how tokens are chosen.
      seed: of the random choices; prompt i uses the key of `seed` with i folded in.
      prefill_tokens: prompt tokens computed at once, of all prompts together.
      steps_per_loop: decode steps between two looks of the host.
      on_tokens: called with (prompt index, new tokens) as they come, stop tokens left out.
      on_finish: called with a prompt's index once its last token has come.

    Raises:
      ValueError: an argument cannot work.
      PagedKVError: an operation of the cache failed for another reason than its size.
    """
    _check_prompts(prompts, config, max_new_tokens, prefill_tokens)
    if sampling.repetition_penalty != 1:
        raise ValueError(
            f"repetition_penalty={sampling.repetition_penalty} needs the prompts' tokens beside the "
            "logits: `paged_kv_jax.server.Server` keeps them, generate does not"
        )
    stop = jnp.asarray(tuple(stop_tokens), jnp.int32)
    prompt_lens = [len(prompt) for prompt in prompts]
    prefill_tokens = min(prefill_tokens, sum(prompt_lens))
    # A prompt that no pool of this size could hold is refused before it takes room from others.
    never_fits = [config.blocks_for(n) > config.num_blocks or n > config.max_seq_len
                  for n in prompt_lens]  # fmt: skip

    batch = _start(config, never_fits, max_new_tokens, seed)
    stream = _Stream(len(prompts), stop_tokens, on_tokens, on_finish)
    with _CompileTime() as compile_time:
        start = time.perf_counter()
        for chunk in _prefill_chunks(prompts, prefill_tokens):
            batch = prefill_chunk(model, batch, *chunk, stop, sampling=sampling)
        stream.update(batch)
        prefill_time = time.perf_counter() - start - compile_time.seconds
        # No step yet: this compiles the loop, so that its time stays out of decoding's.
        batch = jax.block_until_ready(decode_loop(model, batch, 0, stop, sampling=sampling))
    start = time.perf_counter()
    while bool(jnp.any(batch.finish == Finish.RUNNING)):
        batch = decode_loop(model, batch, steps_per_loop, stop, sampling=sampling)
        stream.update(batch)
    decode_time = time.perf_counter() - start

    # Out of blocks is told per prompt; anything else in the sticky word is a fault.
    starved = ResultCode.OUT_OF_BLOCKS.bit | ResultCode.SEQ_TOO_LONG.bit
    state = batch.cache.state
    raise_if_failed(dataclasses.replace(state, errors=state.errors & ~starved))
    return Generated(
        tokens=[_visible(row, stop_tokens) for row in _outputs(batch)],
        finish=[Finish(code) for code in np.asarray(batch.finish)],
        peak_blocks=int(batch.peak_blocks),
        blocks_needed=blocks_needed(prompt_lens, max_new_tokens, config.block_size),
        timing=Timing(compile=compile_time.seconds, prefill=prefill_time, decode=decode_time),
    )


@functools.partial(jax.jit, static_argnames="sampling", donate_argnames="batch")
def prefill_chunk(
    model: LanguageModel,
    batch: Batch,
    tokens: jax.Array,
    q_lens: jax.Array,
    completes: jax.Array,
    stop: jax.Array,
    *,
    sampling: Sampling,
) -> Batch:
    """Take a chunk of prompt tokens into the cache; choose the first token of prompts it completes.

    Args:
      model: the model.
      batch: donated.
      tokens: int32 [T], the chunk's tokens, packed row after row.
      q_lens: int32 [B], tokens of each row in the chunk; 0 for none.
      completes: bool [B], whether the chunk holds the row's last prompt token.
      stop: int32 [X], stop tokens.
      sampling: how tokens are chosen (static).
    """
    num_tokens, num_rows = tokens.shape[0], q_lens.shape[0]
    wanted = (q_lens > 0) & (batch.finish == Finish.RUNNING)
    rows = jnp.where(wanted, jnp.arange(num_rows, dtype=jnp.int32), -1)
    cache, result = batch.cache.allocate(rows, q_lens, max_new_tokens=num_tokens)
    # The plan packs the rows that take part, so the tokens of a row that got no room are taken out.
    got_room = result >= 0
    tokens, q_lens = _pack(tokens, q_lens, wanted & got_room)
    cache, plan = cache.plan(rows, q_lens, result, num_tokens=num_tokens)
    hidden, pool = model(tokens, plan.positions, cache.pool, plan)
    cache = dataclasses.replace(cache, pool=pool)
    starved = wanted & ~got_room
    batch = dataclasses.replace(
        batch,
        seq_ids=jnp.where(wanted, rows, batch.seq_ids),
        finish=jnp.where(starved, Finish.OUT_OF_BLOCKS, batch.finish),
    )
    logits = model.logits(hidden[plan.last_tokens])
    return _choose(batch, cache, logits, completes & wanted & got_room, stop, sampling)


@functools.partial(jax.jit, static_argnames="sampling", donate_argnames="batch")
def decode_loop(
    model: LanguageModel,
    batch: Batch,
    num_steps: jax.Array | int,
    stop: jax.Array,
    *,
    sampling: Sampling,
) -> Batch:
    """Up to `num_steps` decode steps of all running sequences, in one compiled loop.

    Args:
      model: the model.
      batch: donated.
      num_steps: int32 [].
      stop: int32 [X], stop tokens.
      sampling: how tokens are chosen (static).
    """

    def step(carry: tuple[jax.Array, Batch]) -> tuple[jax.Array, Batch]:
        count, batch = carry
        cache, plan, result = batch.cache.step(batch.seq_ids, 1)
        hidden, pool = model(batch.last_token, plan.positions, cache.pool, plan)
        cache = dataclasses.replace(cache, pool=pool)
        batch = dataclasses.replace(
            batch, finish=jnp.where(result < 0, Finish.OUT_OF_BLOCKS, batch.finish)
        )
        batch = _choose(batch, cache, model.logits(hidden), plan.kv_lens > 0, stop, sampling)
        return count + 1, batch

    def goes_on(carry: tuple[jax.Array, Batch]) -> jax.Array:
        count, batch = carry
        return (count < num_steps) & jnp.any(batch.finish == Finish.RUNNING)

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), batch))[1]


def _choose(
    batch: Batch,
    cache: PagedKVCache,
    logits: jax.Array,
    chooses: jax.Array,
    stop: jax.Array,
    sampling: Sampling,
) -> Batch:
    """Choose a token for the rows `chooses` [B], from logits [B, V]; retire rows that are done."""
    num_rows, max_new_tokens = batch.outputs.shape
    token = sample(logits, batch.keys, batch.num_outputs, sampling)
    column = jnp.where(chooses, batch.num_outputs, max_new_tokens)
    outputs = batch.outputs.at[jnp.arange(num_rows), column].set(token, mode="drop")
    num_outputs = batch.num_outputs + chooses.astype(jnp.int32)
    stops = chooses & jnp.any(token[:, None] == stop, axis=1)
    is_full = chooses & (num_outputs >= max_new_tokens)
    finish = jnp.where(is_full, Finish.LENGTH, batch.finish)
    finish = jnp.where(stops, Finish.STOP, finish).astype(jnp.int32)

    peak_blocks = jnp.maximum(batch.peak_blocks, stats(cache.state).used_blocks)
    # A row that ran out before it had a block is in no cache: there is nothing to give back.
    leaves = (finish != Finish.RUNNING) & (batch.seq_ids >= 0)
    holds_blocks = cache.state.seq_block_count[jnp.maximum(batch.seq_ids, 0)] > 0
    cache, _ = cache.free(jnp.where(leaves & holds_blocks, batch.seq_ids, -1))
    return dataclasses.replace(
        batch,
        cache=cache,
        seq_ids=jnp.where(leaves, -1, batch.seq_ids),
        last_token=jnp.where(chooses, token, batch.last_token),
        outputs=outputs,
        num_outputs=num_outputs,
        finish=finish,
        peak_blocks=peak_blocks,
    )


def _pack(tokens: jax.Array, q_lens: jax.Array, keeps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [T] and lengths [B] with the rows that are not kept taken out and the gaps closed."""
    row = jnp.searchsorted(jnp.cumsum(q_lens), jnp.arange(tokens.shape[0]), side="right")
    is_kept = (row < q_lens.shape[0]) & keeps[jnp.minimum(row, q_lens.shape[0] - 1)]
    target = jnp.where(is_kept, jnp.cumsum(is_kept) - 1, tokens.shape[0])
    packed = jnp.zeros_like(tokens).at[target].set(tokens, mode="drop")
    return packed, jnp.where(keeps, q_lens, 0)


def _start(
    config: KVCacheConfig, never_fits: Sequence[bool], max_new_tokens: int, seed: int
) -> Batch:
    num_rows = len(never_fits)
    indices = jnp.arange(num_rows, dtype=jnp.int32)
    return Batch(
        cache=PagedKVCache.create(config),
        seq_ids=jnp.full(num_rows, -1, jnp.int32),
        last_token=jnp.zeros(num_rows, jnp.int32),
        outputs=jnp.zeros((num_rows, max_new_tokens), jnp.int32),
        num_outputs=jnp.zeros(num_rows, jnp.int32),
        finish=jnp.where(jnp.asarray(never_fits), Finish.OUT_OF_BLOCKS, Finish.RUNNING).astype(
            jnp.int32
        ),
        keys=jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(indices),
        peak_blocks=jnp.int32(0),
    )


def _prefill_chunks(prompts: Sequence[Sequence[int]], num_tokens: int):
    """Yield (tokens [T], q_lens [B], completes [B]) until every prompt's tokens have gone by."""
    position = [0] * len(prompts)
    while any(done < len(prompt) for done, prompt in zip(position, prompts, strict=True)):
        tokens, q_lens, completes = [], [], []
        for row, prompt in enumerate(prompts):
            piece = prompt[position[row] : position[row] + num_tokens - len(tokens)]
            tokens += piece
            position[row] += len(piece)
            q_lens.append(len(piece))
            completes.append(bool(piece) and position[row] == len(prompt))
        tokens += [0] * (num_tokens - len(tokens))
        yield jnp.asarray(tokens, jnp.int32), jnp.asarray(q_lens, jnp.int32), jnp.asarray(completes)


class _Stream:
    """Hands on what is new of each row since the last look."""

    def __init__(
        self,
        num_rows: int,
        stop_tokens: Sequence[int],
        on_tokens: Callable[[int, list[int]], None] | None,
        on_finish: Callable[[int], None] | None,
    ):
        self._sent = [0] * num_rows
        self._is_finished = [False] * num_rows
        self._stop_tokens = stop_tokens
        self._on_tokens = on_tokens
        self._on_finish = on_finish

    def update(self, batch: Batch) -> None:
        finish = np.asarray(batch.finish)
        for index, row in enumerate(_outputs(batch)):
            row = _visible(row, self._stop_tokens)
            if self._on_tokens and len(row) > self._sent[index]:
                self._on_tokens(index, row[self._sent[index] :])
            self._sent[index] = len(row)
            if self._on_finish and finish[index] and not self._is_finished[index]:
                self._on_finish(index)
            self._is_finished[index] = bool(finish[index])


def _outputs(batch: Batch) -> list[list[int]]:
    outputs, counts = np.asarray(batch.outputs), np.asarray(batch.num_outputs)
    return [row[:count].tolist() for row, count in zip(outputs, counts, strict=True)]


def _visible(tokens: list[int], stop_tokens: Sequence[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


class _CompileTime:
    """Within a `with` block, the seconds that JAX spent tracing, lowering and compiling so far."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    @property
    def seconds(self) -> float:
        total, end = 0.0, float("-inf")
        for start, stop in sorted(self._spans):  # spans nest: tracing traces inner functions
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total


def _check_prompts(
    prompts: Sequence[Sequence[int]],
    config: KVCacheConfig,
    max_new_tokens: int,
    prefill_tokens: int,
) -> None:
    if not prompts:
        raise ValueError("prompts is empty; give at least one")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{index}] has no tokens; each needs at least one")
    if len(prompts) > config.max_seqs:
        raise ValueError(
            f"there are {len(prompts)} prompts and config.max_seqs={config.max_seqs}; it must be at "
            "least as many"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if prefill_tokens < 1:
        raise ValueError(f"prefill_tokens={prefill_tokens} must be at least 1")
