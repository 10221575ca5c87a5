"""Does the allocator's step cost more the larger the pool is? It must not.

    python benchmarks/allocator_step.py [--out DIR]

Times one decode step's control work, `step` with one token per row, inside one compiled loop that
carries the state, for pools of 1,000, 100,000 and 1,000,000 blocks and tables of the same width.
Sequences start at lengths spread over a block, so that in each step a sixteenth of them takes a block;
after sixteen steps all are freed and started again, in the loop and in its time. Rows beyond the
sequences that 1,000 blocks can serve are padding, in every pool alike. The pools take turns, and the
best of the rounds counts, so that other work on the machine weighs on all of them.
Prints a table and writes it to DIR (benchmarks/results) as JSON and Markdown.
"""

import argparse
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

import paged_kv_jax as pkv

POOLS = (1_000, 100_000, 1_000_000)  # num_blocks
ROWS = (64, 1_024)
BLOCK_SIZE = 16
MAX_LIVE = 480  # each takes two blocks at most
CYCLES = 20  # of BLOCK_SIZE steps, in one call
ROUNDS = 15
LIMIT = 1.2  # times the smallest pool


def config_of(num_blocks: int, num_rows: int) -> pkv.KVCacheConfig:
    """The same tables whatever the pool; the pool itself is never made."""
    return pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_seqs=num_rows, max_blocks_per_seq=64,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="num_rows", donate_argnames="state")
def run(state: pkv.BlockState, *, num_rows: int) -> tuple[pkv.BlockState, jax.Array]:
    """CYCLES x BLOCK_SIZE steps; also a checksum of all plans, so that none is optimised away."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    seq_ids = jnp.where(row < MAX_LIVE, row, -1)
    start_lens = row % BLOCK_SIZE + 1

    def step(carry, _):
        state, checksum = carry
        state, plan, _ = pkv.step(state, seq_ids, 1)
        return (state, checksum + plan.slot_mapping + jnp.sum(plan.block_table, axis=1)), None

    def cycle(carry, _):
        state, checksum = carry
        state, _ = pkv.allocate(state, seq_ids, start_lens, max_new_tokens=BLOCK_SIZE)
        carry, _ = jax.lax.scan(step, (state, checksum), None, length=BLOCK_SIZE)
        state, checksum = carry
        state, _ = pkv.free(state, seq_ids)
        return (state, checksum), None

    carry = (state, jnp.zeros(num_rows, jnp.int32))
    return jax.lax.scan(cycle, carry, None, length=CYCLES)[0]


def seconds_per_step(num_rows: int) -> dict[int, float]:
    """num_blocks -> seconds."""
    states = {num_blocks: pkv.init(config_of(num_blocks, num_rows)) for num_blocks in POOLS}
    best: dict[int, float] = dict.fromkeys(POOLS, float("inf"))
    for _ in range(ROUNDS + 1):  # the first round compiles
        for num_blocks in POOLS:
            jax.block_until_ready(states[num_blocks])
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(run(states[num_blocks], num_rows=num_rows))
            seconds = (time.perf_counter() - begin) / (CYCLES * BLOCK_SIZE)
            best[num_blocks] = min(best[num_blocks], seconds)
            states[num_blocks] = state
    for state in states.values():
        pkv.raise_if_failed(state)
        if broken := pkv.check_invariants(state):
            raise RuntimeError(f"the allocator broke its invariants: {broken}")
    return best


def processor() -> str:
    """The CPU's name where the system tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Time, print, write, and fail if the step grows with the pool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    out = parser.parse_args().out
    device = jax.devices()[0]
    record = {
        "command": "python benchmarks/allocator_step.py",
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "block_size": BLOCK_SIZE,
        "steps_per_call": CYCLES * BLOCK_SIZE,
        "rounds": ROUNDS,
        "microseconds_per_step": {},
    }
    lines = [
        f"{record['device']} ({record['cpu_count']} cores), JAX {record['jax']}, "
        f"Python {record['python']}, {record['date']}; `{record['command']}`",
        "",
        "Microseconds for one `step` (append and plan) in a compiled loop, by blocks in the pool; "
        f"the last column must stay at {LIMIT} or below.",
        "",
        "| rows | "
        + " | ".join(f"{num_blocks:,}" for num_blocks in POOLS)
        + " | largest / smallest |",
        "|--:" * (len(POOLS) + 2) + "|",
    ]
    worst = 0.0
    for num_rows in ROWS:
        times = seconds_per_step(num_rows)
        ratio = times[POOLS[-1]] / times[POOLS[0]]
        worst = max(worst, ratio)
        record["microseconds_per_step"][str(num_rows)] = {
            str(num_blocks): round(1e6 * seconds, 2) for num_blocks, seconds in times.items()
        }
        cells = " | ".join(f"{1e6 * times[num_blocks]:.1f}" for num_blocks in POOLS)
        lines.append(f"| {num_rows:,} | {cells} | {ratio:.2f} |")
    print("\n".join(lines))
    out.mkdir(parents=True, exist_ok=True)
    name = f"allocator_step_{device.platform}"
    (out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    if worst > LIMIT:
        sys.exit(f"the step grows with the pool: {worst:.2f} times is more than {LIMIT}")


if __name__ == "__main__":
    main()
