"""What the allocator costs: decode steps, admission with prefix reuse, eviction, a shared system prompt.

Times are wall-clock, per step of one compiled loop over many steps: the loop's own cost is in them, and
the call's dispatch all but not. Each is the median of several calls; cases that are compared alternate,
so that a noisy machine disturbs them alike.

    python benchmarks/allocator.py            # writes benchmarks/results/allocator_<platform>.{md,json}
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS, BLOCK_SIZE, MAX_BLOCKS = 1024, 16, 64
PROMPTS, SYSTEM = 64, 2048


def geometry(num_blocks: int, max_seqs: int, max_blocks_per_seq: int) -> pkv.KVCacheConfig:
    """A config for control state alone; no pool is made of it."""
    return pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_seqs=max_seqs, max_blocks_per_seq=max_blocks_per_seq,
    )  # fmt: skip


def alternate(cases: dict[str, tuple], steps: int, repeats: int) -> dict[str, float]:
    """Microseconds for one step of each case, `(jitted function, donated argument, *arguments)`."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, (function, carry, *arguments) in cases.items():
            fresh = jax.block_until_ready(jax.tree.map(jnp.copy, carry))
            start = time.perf_counter()
            jax.block_until_ready(function(fresh, *arguments, steps=steps))
            if repeat:  # the first call compiles
                times[name].append((time.perf_counter() - start) / steps * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def loop(function: Callable) -> Callable:
    """A compiled loop whose carry is donated, with a static number of steps."""
    return jax.jit(function, static_argnames="steps", donate_argnums=0)


# A decode step


@functools.partial(jax.jit, static_argnames=("steps", "implementation"), donate_argnums=0)
def decode_steps(
    state: pkv.BlockState, seq_ids: jax.Array, steps: int, implementation: str | None = None
):
    """Append and plan; carrying the plan makes every step compute all of it."""

    def step(state):
        return pkv.step(state, seq_ids, 1, implementation=implementation)[:2]

    return jax.lax.scan(lambda carry, _: (step(carry[0]), None), step(state), length=steps)[0]


@loop
def empty_steps(x: jax.Array, steps: int):
    """The loop's own cost."""
    return jax.lax.scan(lambda x, _: (x + 1, None), x, length=steps)[0]


@loop
def searching_steps(carry: tuple[jax.Array, jax.Array, jax.Array], steps: int):
    """What `decode_steps` replaces: row by row, and block by block until a free one is found.

    Args:
      carry: bool [N], the blocks in use; the block table [S, M]; the lengths [S].
      steps: steps to make.
    """

    def append_row(row, carry):
        is_taken, table, lens = carry

        def take(is_taken, table):
            block = jax.lax.while_loop(lambda block: is_taken[block], lambda block: block + 1, 0)
            return is_taken.at[block].set(True), table.at[row, lens[row] // BLOCK_SIZE].set(block)

        is_full = lens[row] % BLOCK_SIZE == 0
        is_taken, table = jax.lax.cond(is_full, take, lambda *same: same, is_taken, table)
        return is_taken, table, lens.at[row].add(1)

    def step(carry):
        is_taken, table, lens = jax.lax.fori_loop(0, ROWS, append_row, carry)
        position = lens - 1
        slots = table[jnp.arange(ROWS), position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        return (is_taken, table, lens), (table, lens, position, slots)

    return jax.lax.scan(lambda both, _: (step(both[0]), None), step(carry), length=steps)[0]


def measure_decode(steps: int, repeats: int) -> list[list[object]]:
    """Rows: blocks, live rows, microseconds."""
    steppers: dict[str, Callable] = {"": decode_steps}
    if jax.devices()[0].platform == "gpu":  # elsewhere that is what it picks
        steppers[", as XLA operations"] = functools.partial(decode_steps, implementation="xla")
    seq_ids = jnp.arange(ROWS, dtype=jnp.int32)
    cases, live = {}, {}
    for num_blocks in (1_000, 100_000, 1_000_000):
        live[num_blocks] = min(ROWS, num_blocks // (2 + steps // BLOCK_SIZE))
        rows = jnp.where(seq_ids < live[num_blocks], seq_ids, -1)
        # Lengths of 1 to 16: in each step a sixteenth of the rows takes a block.
        lens = 1 + jnp.arange(ROWS, dtype=jnp.int32) % BLOCK_SIZE
        state, _ = pkv.allocate(pkv.init(geometry(num_blocks, ROWS, MAX_BLOCKS)), rows, lens)
        for suffix, stepper in steppers.items():
            cases[f"{num_blocks:,}{suffix}"] = (stepper, state, rows)
    cases["empty loop"] = (empty_steps, seq_ids)
    times = alternate(cases, steps, repeats)
    names = [(f"{n:,}{suffix}", live[n]) for suffix in steppers for n in live]
    rows = [[name, count, round(times[name], 2)] for name, count in names]
    return [*rows, ["empty loop", "", round(times["empty loop"], 2)]]


def measure_search(steps: int, repeats: int) -> dict[str, float]:
    """The same step with 100,000 blocks of which a third is in use at first, and with a search among them."""
    num_blocks = 100_000
    seq_ids = jnp.arange(ROWS, dtype=jnp.int32)
    lens = 513 + seq_ids % BLOCK_SIZE
    state, _ = pkv.allocate(pkv.init(geometry(num_blocks, ROWS, MAX_BLOCKS)), seq_ids, lens)
    searched = (state.ref_count > 0, state.block_table, lens)
    cases = {"ours": (decode_steps, state, seq_ids), "search": (searching_steps, searched)}
    copies = jax.tree.map(jnp.copy, (state, searched))
    (_, plan), (_, (_, kv_lens, *_)) = (
        decode_steps(copies[0], seq_ids, steps=steps), searching_steps(copies[1], steps=steps)
    )  # fmt: skip
    np.testing.assert_array_equal(plan.kv_lens, kv_lens)
    return alternate(cases, steps, repeats)


# Admission and eviction


def warm_index(num_blocks: int, num_tokens: int, prompts: int):
    """An index that holds one system prompt; `prompts` prompts that begin with it."""
    rng = np.random.default_rng(0)
    config = geometry(num_blocks, 2 * prompts + 1, -(-num_tokens // BLOCK_SIZE) + 1)
    tokens = rng.integers(0, 50_000, (prompts, num_tokens), dtype=np.int32)
    tokens[:, :SYSTEM] = tokens[0, :SYSTEM]
    tokens, lens = jnp.asarray(tokens), jnp.full(prompts, num_tokens, jnp.int32)
    state, index, last = pkv.init(config), pkv.init_prefix_index(config), jnp.array([2 * prompts])
    state, _ = pkv.allocate(state, last, SYSTEM)
    index, state, _ = jax.jit(pkv.commit)(index, state, last, tokens[:1], jnp.array([SYSTEM]))
    state, _ = pkv.free(state, last)
    return index, state, tokens, lens


@functools.partial(jax.jit, static_argnames=("steps", "forks"), donate_argnums=0)
def admission_steps(carry, tokens, lens, steps: int, forks: bool = False):
    """Admit all prompts (match, share, take blocks), fork each once if `forks`, and free all."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    def step(carry, _):
        index, state, total = carry
        new = jnp.where(
            total[:, None] < 0, 0, tokens
        )  # so that no step's hashes are known before it
        index, state, result, found = pkv.admit(index, state, rows, new, lens)
        if forks:
            state, _, copies = pkv.fork(state, rows, rows + rows.shape[0])
            state, _ = pkv.free(state, rows + rows.shape[0])
            total += copies.dst
        state, _ = pkv.free(state, rows)
        return (index, state, total + result + found), None

    return jax.lax.scan(step, (*carry, jnp.zeros_like(rows)), length=steps)[0]


@loop
def free_steps(state: pkv.BlockState, seq_ids: jax.Array, steps: int):
    """What `admission_steps` does besides admitting, on sequences already gone: the same program."""

    def step(state, _):
        return pkv.free(state, seq_ids)[0], None

    return jax.lax.scan(step, state, length=steps)[0]


@loop
def match_steps(found: jax.Array, index, tokens, lens, steps: int):
    """Matching alone; each step's tokens depend on the last step's result, `found`."""

    def step(found, _):
        return pkv.match_prefix(index, jnp.where(found[:, None] < 0, 0, tokens), lens)[1], None

    return jax.lax.scan(step, found, length=steps)[0]


@loop
def commit_steps(carry, tokens, lens, steps: int):
    """Committing what is committed already: what it costs to call it once too often."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    def step(carry, _):
        index, state, total = carry
        new = jnp.where(total[:, None] < 0, 0, tokens)
        index, state, result = pkv.commit(index, state, rows, new, lens)
        return (index, state, total + result), None

    return jax.lax.scan(step, (*carry, jnp.zeros_like(rows)), length=steps)[0]


@loop
def evict_steps(carry, steps: int):
    """One eviction: a sort over all blocks, a batch of them given back."""

    batch = carry[0].num_blocks // 64

    def step(carry, _):
        index, state = carry
        index, state, count = pkv.evict(index, state, batch)
        return (index, state), count

    return jax.lax.scan(step, carry, length=steps)[0]


def measure_admission(steps: int, repeats: int) -> list[list[object]]:
    """Rows: what, blocks, tokens of a prompt, microseconds."""
    cases = {}
    for num_tokens in (SYSTEM + 64, 2 * SYSTEM):
        index, state, tokens, lens = warm_index(65_536, num_tokens, PROMPTS)
        _, started, result, found = jax.jit(pkv.admit)(
            index, state, jnp.arange(PROMPTS), tokens, lens
        )
        np.testing.assert_array_equal(found, SYSTEM)
        np.testing.assert_array_less(0, result)
        index, started, _ = jax.jit(pkv.commit)(index, started, jnp.arange(PROMPTS), tokens, lens)
        size = f"{PROMPTS} prompts of {num_tokens} tokens"
        cold = warm_index(65_536, num_tokens, PROMPTS)[:2]
        rows = jnp.arange(PROMPTS, dtype=jnp.int32)
        cases |= {
            f"match, {size}": (match_steps, rows, index, tokens, lens),
            f"admit and free, {size}": (admission_steps, cold, tokens, lens),
            f"admit, fork and free both, {size}": (
                functools.partial(admission_steps, forks=True), cold, tokens, lens,
            ),
            f"free alone, {size}": (free_steps, state, rows),
            f"commit, nothing new, {size}": (commit_steps, (index, started), tokens, lens),
        }  # fmt: skip
    for num_blocks in (65_536, 1_000_000):
        index, state, *_ = warm_index(num_blocks, SYSTEM + 64, PROMPTS)
        name = f"evict {num_blocks // 64:,} of {num_blocks:,} blocks"
        cases[name] = (evict_steps, (index, state))
    cases["empty loop"] = (empty_steps, jnp.arange(PROMPTS))
    return [[name, round(us, 1)] for name, us in alternate(cases, steps, repeats).items()]


def host_match(num_tokens: int) -> float:
    """Microseconds for the same match in Python, over a dict of (parent, tokens): 64 prompts, all hits."""
    *_, tokens, _ = warm_index(65_536, num_tokens, PROMPTS)
    prompts = np.asarray(tokens).tolist()

    def blocks(prompt):
        for start in range(0, num_tokens - 1, BLOCK_SIZE):
            yield tuple(prompt[start : start + BLOCK_SIZE])

    children: dict[tuple, int] = {}
    for prompt in prompts:
        parent = -1
        for block in blocks(prompt):
            parent = children.setdefault((parent, block), len(children))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for prompt in prompts:
            parent = -1
            for block in blocks(prompt):
                parent = children.get((parent, block), -1)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


# A shared system prompt


def reuse_counts(question: int) -> list[object]:
    """Blocks used and tokens to prefill for 64 requests with one system prompt, without and with."""
    num_tokens = SYSTEM + question
    index, state, tokens, lens = warm_index(16_384, num_tokens, PROMPTS)
    index, state, _ = pkv.forget(index, state)
    rows = jnp.arange(PROMPTS, dtype=jnp.int32)
    plain, _ = pkv.allocate(state, rows, num_tokens)
    admit, commit = jax.jit(pkv.admit), jax.jit(pkv.commit)
    computed = 0
    for some in (rows[:1], rows[1:]):  # the first request is prefilled when the others come
        index, state, _, found = admit(index, state, some, tokens[some], lens[some])
        index, state, _ = commit(index, state, some, tokens[some], lens[some])
        computed += int(jnp.sum(lens[some] - found))
    used, without = (int(pkv.stats(each).used_blocks) for each in (state, plain))
    total = PROMPTS * num_tokens
    return [
        question,
        without,
        used,
        round(without / used, 1),
        total,
        computed,
        round(total / computed, 1),
    ]


def texts_agree(new_tokens: int = 8) -> bool:
    """Whether a small Llama with random weights writes the same text for each request either way."""
    from flax import nnx

    from paged_kv_jax.models.llama import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=4096,
    )  # fmt: skip
    model = Llama(config, rngs=nnx.Rngs(0))
    num_tokens, width = SYSTEM + 2, SYSTEM + BLOCK_SIZE
    tokens = np.random.default_rng(1).integers(0, 256, (PROMPTS, width), dtype=np.int32)
    tokens[:, :SYSTEM] = tokens[0, :SYSTEM]
    tokens, lens = jnp.asarray(tokens), jnp.full(PROMPTS, num_tokens, jnp.int32)
    cache_config = config.kv_cache_config(
        num_blocks=PROMPTS * (width // BLOCK_SIZE + 1), max_seqs=PROMPTS,
        max_blocks_per_seq=width // BLOCK_SIZE + 1, dtype=jnp.float32,
    )  # fmt: skip

    @functools.partial(jax.jit, static_argnames=("reuses", "room"), donate_argnames="cache")
    def prefill(model, cache, rows, tokens, lens, reuses: bool, room: int):
        found = jnp.zeros_like(lens)
        if reuses:
            cache, result, found = cache.admit(rows, tokens, lens)
        else:
            cache, result = cache.allocate(rows, lens)
        cache, plan = cache.plan(rows, lens - found, result, num_tokens=room)
        new = tokens[jnp.maximum(plan.token_rows, 0), plan.positions]
        hidden, pool = model(new, plan.positions, cache.pool, plan)
        logits = model.logits(hidden[plan.last_tokens])
        cache = dataclasses.replace(cache, pool=pool)
        if reuses:
            cache, _ = cache.commit(rows, tokens, lens)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    @jax.jit
    def decode(model, cache, rows, first):
        def step(carry, _):
            cache, token = carry
            cache, plan, _ = cache.step(rows, 1)
            hidden, pool = model(token, plan.positions, cache.pool, plan)
            token_after = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
            return (dataclasses.replace(cache, pool=pool), token_after), token

        return jax.lax.scan(step, (cache, first), length=new_tokens)[1]

    rows, texts = jnp.arange(PROMPTS, dtype=jnp.int32), []
    for reuses in (False, True):
        cache = pkv.PagedKVCache.create(cache_config, prefix_reuse=reuses)
        first = []
        for row in range(PROMPTS):
            room = width if row == 0 or not reuses else BLOCK_SIZE
            one = slice(row, row + 1)
            cache, token = prefill(
                model, cache, rows[one], tokens[one], lens[one], reuses=reuses, room=room
            )
            first.append(token)
        texts.append(np.asarray(decode(model, cache, rows, jnp.concatenate(first))))
    return bool(np.array_equal(*texts))


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of one compiled loop")
    parser.add_argument("--repeats", type=int, default=7, help="calls of each loop")
    parser.add_argument("--text", action="store_true", help="also compare texts (needs flax; slow)")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    hardware = device.device_kind if device.platform == "gpu" else processor()
    lines = [
        f"{hardware}, JAX {jax.__version__}, Python {platform.python_version()}, "
        f"{datetime.date.today()}; `python {shlex.join(sys.argv)}`",
    ]
    decode = measure_decode(arguments.steps, arguments.repeats)
    header = ["blocks in the pool", "live rows", "us"]
    lines += [
        "",
        f"One decode step (`step`: append and plan) for {ROWS:,} rows of up to {MAX_BLOCKS} blocks in a "
        "compiled loop. A pool too small for all rows has padding rows, which cost the same.",
        "",
        *table(header, decode),
    ]
    search = None
    if device.platform == "cpu":
        search = measure_search(min(arguments.steps, 400), arguments.repeats)
        lines += [
            "",
            f"With 100,000 blocks, a third to a half of them in use: {search['ours']:.0f} us, and "
            f"{search['search']:.0f} us for a compiled loop over the rows that looks at the blocks one "
            "by one for a free one: "
            f"{search['search'] / search['ours']:.1f} times as long.",
        ]
    steps = max(1, arguments.steps // (4 if device.platform == "gpu" else 100))
    admission = measure_admission(steps, arguments.repeats)
    admission.append(
        [f"match in Python, {PROMPTS} prompts of 4096 tokens", round(host_match(4096), 1)]
    )
    lines += [
        "",
        f"Admission with prefix reuse: prompts that share {SYSTEM} tokens, over 65,536 blocks of "
        f"{BLOCK_SIZE} tokens. An eviction is needed once for as many blocks as it gives back.",
        "",
        *table(["what, in a compiled loop", "us"], admission),
    ]
    reuse = [reuse_counts(question) for question in (2, 32)]
    header = [
        "question tokens",
        "blocks without",
        "with",
        "fewer",
        "prefill without",
        "with",
        "fewer",
    ]
    lines += [
        "",
        f"{PROMPTS} requests with one system prompt of {SYSTEM} tokens:",
        "",
        *table(header, reuse),
    ]
    agree = texts_agree() if arguments.text else None
    if agree is not None:
        lines += ["", f"Texts of a small Llama with and without reuse are identical: {agree}."]
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    record = dict(
        hardware=hardware, jax=jax.__version__, command=shlex.join(sys.argv), decode_us=decode,
        search_us=search, admission_us=admission, reuse=reuse, texts_agree=agree,
    )  # fmt: skip
    (RESULTS / f"allocator_{device.platform}.md").write_text(text)
    (RESULTS / f"allocator_{device.platform}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(header: list[str], rows: list[list[object]]) -> list[str]:
    """Lines of a Markdown table."""
    body = [header, ["--:"] * len(header), *rows]
    return ["| " + " | ".join(map(str, row)) + " |" for row in body]


def processor() -> str:
    """The CPU's name."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()


if __name__ == "__main__":
    main()
