"""Continuous batching on the CPU against static batching with contiguous caches, in the same memory.

64 requests for SmolLM2 (float32) of 20 to 400 prompt tokens and 10 to 200 new tokens, all there from the
start, and a pool that holds a third of their tokens. Lengths are drawn evenly, and once more evenly in
their logarithm (many short, few long). Compared are

  * the server: everything `paged_kv_jax.server` does, its looks at the host included;
  * static batching: the same model with contiguous caches that are as long as the longest prompt and the
    longest output together, as many rows as fit into the pool's memory, requests in order of arrival.
    Prompts are padded to the longest, so that one program serves all batches; a batch decodes in one
    compiled loop until its last row has all its tokens.
  * one request at a time through a contiguous cache, which is what both texts must be equal to.

Server and static batching take turns, and the median of the rounds counts; the seconds of all cores
together are told, too, as they depend less on what else the machine does. Fails if a text differs, if
anything compiles after the warm-up, or if a block is not free at the end.

    python benchmarks/serving_cpu.py           # writes benchmarks/results/serving_cpu.{md,json}
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from paged_kv_jax.models import load_model
from paged_kv_jax.models.contiguous import ContiguousCache, contiguous_forward, init_cache
from paged_kv_jax.models.llama import Llama
from paged_kv_jax.scheduler import ServingConfig, Status
from paged_kv_jax.server import Request, Server

REQUESTS, BLOCK_SIZE, SLOTS = 64, 16, 32
PROMPT_LENS, NEW_TOKENS = (20, 400), (10, 200)
MIXED_SIZES, DECODE_SIZES = (128, 256, 384, 512), (8, 16, 24)
RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked: prompts of token ids, and how many tokens each is to be continued by."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def tokens(self) -> int:
        """Prompts and outputs."""
        return sum(map(len, self.prompts)) + sum(self.new_tokens)

    @property
    def longest(self) -> int:
        """What a cache must hold that any of the requests may be put into."""
        return max(map(len, self.prompts)) + max(self.new_tokens)


def workload(lengths: str) -> Workload:
    """The requests; each length appears at the quantiles of its distribution, in random order."""
    rng = np.random.default_rng(0)
    quantiles = (np.arange(REQUESTS) + 0.5) / REQUESTS

    def draw(low: int, high: int) -> np.ndarray:
        even = low + (high - low) * quantiles
        drawn = even if lengths == "even" else low * (high / low) ** quantiles
        return rng.permutation(np.round(drawn).astype(int))

    prompt_lens, new_tokens = draw(*PROMPT_LENS), draw(*NEW_TOKENS)
    prompts = [rng.integers(1000, 40000, length).tolist() for length in prompt_lens]
    return Workload(prompts, new_tokens.tolist())


@jax.jit
def static_prefill(
    model: Llama, tokens: jax.Array, lens: jax.Array, cache: ContiguousCache
) -> tuple[jax.Array, ContiguousCache]:
    """The first new token of each padded prompt, int32 [B], and the filled cache."""
    hidden, cache = contiguous_forward(model, tokens, jnp.zeros_like(lens), cache)
    last = jnp.take_along_axis(hidden, jnp.maximum(lens - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(model.logits(last), axis=-1).astype(jnp.int32), cache


@functools.partial(jax.jit, donate_argnames="cache")
def static_decode(
    model: Llama, token: jax.Array, lens: jax.Array, num_steps: jax.Array, cache: ContiguousCache
) -> tuple[jax.Array, ContiguousCache]:
    """`num_steps` more tokens of each row: int32 [B, NEW_TOKENS], the first one included."""
    outputs = jnp.zeros((token.shape[0], NEW_TOKENS[1]), jnp.int32).at[:, 0].set(token)

    def step(carry):
        nth, token, outputs, cache = carry
        hidden, cache = contiguous_forward(model, token[:, None], lens + nth, cache)
        token = jnp.argmax(model.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)
        return nth + 1, token, outputs.at[:, nth + 1].set(token), cache

    carry = (jnp.int32(0), token, outputs, cache)
    *_, outputs, cache = jax.lax.while_loop(lambda carry: carry[0] < num_steps, step, carry)
    return outputs, cache


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> np.ndarray:
        """Seconds by the clock on the wall, and of all cores together."""
        return np.array([time.perf_counter() - self._wall, time.process_time() - self._cpu])


def run_static(model: Llama, work: Workload, batch: int) -> tuple[list[list[int]], np.ndarray]:
    """All requests, `batch` at a time in order of arrival: the texts, and the time it took."""
    width = max(map(len, work.prompts))
    texts = []
    empty = init_cache(model.config, batch, work.longest)
    clock = Clock()
    for first in range(0, REQUESTS, batch):
        prompts = work.prompts[first : first + batch]
        counts = work.new_tokens[first : first + batch]
        tokens, lens = np.zeros((batch, width), np.int32), np.zeros(batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lens[row] = prompt, len(prompt)
        token, cache = static_prefill(model, tokens, lens, empty)
        outputs, _ = static_decode(model, token, lens, max(counts) - 1, cache)
        rows = np.asarray(outputs)
        texts += [row[:count].tolist() for row, count in zip(rows, counts, strict=False)]
    return texts, clock.read()


def serving_config(model: Llama, work: Workload) -> ServingConfig:
    """A pool that holds a third of the tokens."""
    return ServingConfig(
        cache=model.config.kv_cache_config(
            num_blocks=work.tokens // 3 // BLOCK_SIZE, block_size=BLOCK_SIZE, max_seqs=SLOTS,
            max_blocks_per_seq=-(-work.longest // BLOCK_SIZE), dtype=jnp.float32,
        ),
        max_requests=REQUESTS, mixed_sizes=MIXED_SIZES, decode_sizes=DECODE_SIZES,
    )  # fmt: skip


def run_server(server: Server, work: Workload) -> tuple[list[list[int]], np.ndarray]:
    """All requests: the texts, and the time it took. Fails if a request did not complete."""
    clock = Clock()
    numbers = [
        server.add(Request(prompt=prompt, max_new_tokens=count))
        for prompt, count in zip(work.prompts, work.new_tokens, strict=True)
    ]
    results = server.run()
    seconds = clock.read()
    if any(results[number, 0].finish is not Status.LENGTH for number in numbers):
        raise RuntimeError("a request did not complete")
    state = server.scheduler.cache.state
    if int(state.free_top) != state.num_blocks:
        raise RuntimeError(f"{state.num_blocks - int(state.free_top)} blocks are not free")
    return [results[number, 0].tokens for number in numbers], seconds


def compare(model: Llama, lengths: str, rounds: int) -> dict:
    """Everything of one workload."""
    work = workload(lengths)
    config = serving_config(model, work)
    batch = config.cache.token_capacity // work.longest
    server = Server(model, config)
    begin = time.perf_counter()
    server.warm_up()
    print(f"{lengths}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    empty = init_cache(model.config, batch, work.longest)
    tokens = np.zeros((batch, max(map(len, work.prompts))), np.int32)
    lens = np.ones(batch, np.int32)
    token, cache = static_prefill(model, tokens, lens, empty)
    jax.block_until_ready(static_decode(model, token, lens, 0, cache))
    compilations: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    seconds, static_seconds, texts = [], [], []
    for nth in range(rounds):
        done = server.totals
        jax.monitoring.register_event_duration_secs_listener(note)
        text, time_taken = run_server(server, work)
        jax.monitoring.unregister_event_duration_listener(note)
        seconds.append(time_taken)
        texts.append(text)
        text, time_taken = run_static(model, work, batch)
        static_seconds.append(time_taken)
        texts.append(text)
        print(
            f"{lengths}, round {nth}, server and static: {seconds[-1]}, {static_seconds[-1]}",
            flush=True,
        )
    if compilations:
        raise RuntimeError(f"{len(compilations)} programs were compiled after the warm-up")
    expected, single_seconds = one_by_one(model, work)
    differ = [sum(a != b for a, b in zip(text, expected, strict=True)) for text in texts]
    if any(differ):
        raise RuntimeError(f"texts that differ from those of one-by-one runs: {differ}")
    totals = {
        name: getattr(server.totals, name) - getattr(done, name)
        for name in ("steps", "mixed_steps", "computed_tokens", "new_tokens", "preemptions")
    }
    new_tokens = sum(work.new_tokens)
    ours, static = np.median(seconds, axis=0), np.median(static_seconds, axis=0)
    return {
        "lengths": lengths,
        "prompt_tokens": sum(map(len, work.prompts)),
        "num_blocks": config.cache.num_blocks,
        "static_batch": batch,
        "static_cache_tokens": work.longest,
        "server_wall_and_cpu_seconds": np.array(seconds).tolist(),
        "static_wall_and_cpu_seconds": np.array(static_seconds).tolist(),
        "one_by_one_wall_and_cpu_seconds": single_seconds.tolist(),
        "server_tokens_per_second": new_tokens / ours[0],
        "static_tokens_per_second": new_tokens / static[0],
        "one_by_one_tokens_per_second": new_tokens / single_seconds[0],
        "ratio": static[0] / ours[0],
        "cpu_ratio": static[1] / ours[1],
        **totals,
        "peak_blocks": server.totals.peak_blocks,
    }


def one_by_one(model: Llama, work: Workload) -> tuple[list[list[int]], np.ndarray]:
    """Each request alone: what the others must be equal to."""
    return run_static(model, work, 1)


def main() -> None:
    """Run, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=["even", "log-even"])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    model = load_model("smollm2", jnp.float32).model
    rows = []
    for lengths in arguments.lengths:  # kept as they come
        rows.append(compare(model, lengths, arguments.rounds))
        keep(rows, arguments.rounds, arguments.out)


def keep(rows: list[dict], rounds: int, out: pathlib.Path) -> None:
    """Print the table of `rows`, and write it with the record to `out`."""
    record = {
        "hardware": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "slots": SLOTS,
        "mixed_sizes": MIXED_SIZES,
        "decode_sizes": DECODE_SIZES,
        "rows": rows,
    }
    lines = [
        f"# {REQUESTS} requests for SmolLM2-135M on the CPU, float32",
        "",
        f"{record['hardware']}; {record['versions']}; `{record['command']}`; {record['date']}",
        "",
        f"Prompts of {PROMPT_LENS[0]} to {PROMPT_LENS[1]} tokens, outputs of {NEW_TOKENS[0]} to "
        f"{NEW_TOKENS[1]}, a pool that holds a third of all tokens. Static batching has contiguous "
        "caches as long as the longest prompt and the longest output, as many as fit into the same "
        "memory, requests in order of arrival, prompts padded to the longest. New tokens per second, "
        f"median of {rounds} rounds in turns. All texts equal those of one-by-one runs; "
        "nothing compiled after the warm-up; all blocks free at the end.",
        "",
        "| lengths drawn | pool, tokens | static rows | server | static | one by one | server / static "
        "| by CPU seconds | preemptions | tokens computed twice |",
        "|" + "---|" * 10,
        *(
            f"| {row['lengths']} | {row['num_blocks'] * BLOCK_SIZE:,} "
            f"| {row['static_batch']} x {row['static_cache_tokens']} "
            f"| {row['server_tokens_per_second']:.1f} | {row['static_tokens_per_second']:.1f} "
            f"| {row['one_by_one_tokens_per_second']:.1f} | {row['ratio']:.2f} "
            f"| {row['cpu_ratio']:.2f} | {row['preemptions']} "
            f"| {row['computed_tokens'] - row['prompt_tokens'] - row['new_tokens'] + REQUESTS} |"
            for row in rows
        ),
    ]
    print("\n".join(lines))
    out.mkdir(parents=True, exist_ok=True)
    (out / "serving_cpu.md").write_text("\n".join(lines) + "\n")
    (out / "serving_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


def processor() -> str:
    """The processor's model name."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
