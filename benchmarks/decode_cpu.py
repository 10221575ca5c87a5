"""Decode on the CPU: SmolLM2 through the paged cache against the same model with contiguous caches.

Both run the same number of greedy steps in one compiled loop, up to a context of 512 tokens; the
paged loop includes the allocator and the plan, and the contiguous cache is exactly as long as it must
be. Runs alternate, so that a noisy machine disturbs both alike, and both must choose the same tokens.

    python benchmarks/decode_cpu.py            # writes benchmarks/results/decode_cpu.{md,json}
"""

import argparse
import datetime
import functools
import json
import pathlib
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv
from paged_kv_jax.models import load_model
from paged_kv_jax.models.contiguous import ContiguousCache, contiguous_forward, init_cache
from paged_kv_jax.models.llama import Llama

CONTEXT, STEPS, BLOCK_SIZE = 512, 16, 16
RESULTS = pathlib.Path(__file__).parent / "results"


@functools.partial(jax.jit, donate_argnames="cache")
def paged_steps(model: Llama, cache: pkv.PagedKVCache, token: jax.Array):
    """STEPS greedy tokens after `token` [B]: int32 [STEPS, B], and the cache."""
    seq_ids = jnp.arange(token.shape[0], dtype=jnp.int32)

    def step(carry, _):
        cache, token = carry
        cache, plan, _ = cache.step(seq_ids, 1)
        hidden, pool = model(token, plan.positions, cache.pool, plan)
        cache = pkv.PagedKVCache(config=cache.config, state=cache.state, pool=pool)
        token = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
        return (cache, token), token

    (cache, _), tokens = jax.lax.scan(step, (cache, token), length=STEPS)
    return tokens, cache


@functools.partial(jax.jit, donate_argnames="cache")
def contiguous_steps(model: Llama, cache: ContiguousCache, token: jax.Array):
    """The same with contiguous caches that hold CONTEXT - STEPS tokens of each row."""

    def step(carry, start):
        cache, token = carry
        starts = jnp.full(token.shape[0], start)
        hidden, cache = contiguous_forward(model, token[:, None], starts, cache)
        token = jnp.argmax(model.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)
        return (cache, token), token

    starts = jnp.arange(CONTEXT - STEPS, CONTEXT)
    (cache, _), tokens = jax.lax.scan(step, (cache, token), starts)
    return tokens, cache


def filled_caches(model: Llama, prompts: jax.Array):
    """Both caches with prompts [B, CONTEXT - STEPS] in them."""
    batch, length = prompts.shape
    contiguous = init_cache(model.config, batch, CONTEXT)
    _, contiguous = jax.jit(contiguous_forward)(
        model, prompts, jnp.zeros(batch, jnp.int32), contiguous
    )
    config = model.config.kv_cache_config(
        num_blocks=batch * CONTEXT // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_seqs=batch,
        max_blocks_per_seq=CONTEXT // BLOCK_SIZE,
        dtype=jnp.float32,
    )
    cache = pkv.PagedKVCache.create(config)
    seq_ids = jnp.arange(batch, dtype=jnp.int32)
    cache, result = cache.allocate(seq_ids, length)
    cache, plan = cache.plan(seq_ids, length, result)
    pool = cache.pool
    for layer in range(config.num_layers):
        k, v = (array[layer][:, :length].reshape(-1, *array[layer].shape[2:])
                for array in (contiguous.k, contiguous.v))  # fmt: skip
        pool = jax.jit(pkv.write, donate_argnums=0)(pool, layer, k, v, plan)
    return pkv.PagedKVCache(config=config, state=cache.state, pool=pool), contiguous


def compare(model: Llama, batch: int, repeats: int) -> dict[str, float]:
    """Median milliseconds per step of both, and the median of the runs' ratios."""
    rng = np.random.default_rng(batch)
    prompts = jnp.asarray(rng.integers(1000, 40000, (batch, CONTEXT - STEPS)), jnp.int32)
    paged, contiguous = filled_caches(model, prompts)
    token = prompts[:, -1]
    ours, theirs, chosen = [], [], []
    for _ in range(repeats + 1):  # the first compiles
        for steps, cache, times in (
            (paged_steps, paged, ours),
            (contiguous_steps, contiguous, theirs),
        ):
            cache = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
            start = time.perf_counter()
            tokens, cache = jax.block_until_ready(steps(model, cache, token))
            times.append(1e3 * (time.perf_counter() - start) / STEPS)
            chosen.append(np.asarray(tokens))
    assert all(np.array_equal(tokens, chosen[0]) for tokens in chosen), "the texts differ"
    return {
        "batch": batch,
        "paged_ms": statistics.median(ours[1:]),
        "contiguous_ms": statistics.median(theirs[1:]),
        "ratio": statistics.median(a / b for a, b in zip(ours[1:], theirs[1:], strict=True)),
    }


def main() -> None:
    """Run, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    model = load_model("smollm2", jnp.float32).model
    rows = [compare(model, batch, arguments.repeats) for batch in (1, 8)]
    record = {
        "hardware": f"{cpu_name()}, {len(jax.devices())} JAX CPU device, {cores()} cores",
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    lines = [
        f"# SmolLM2-135M decode on the CPU, float32, context {CONTEXT}, block_size {BLOCK_SIZE}",
        "",
        f"{record['hardware']}; {record['versions']}; `{record['command']}`; {record['date']}",
        "",
        "| batch | paged, ms/step | contiguous, ms/step | ratio |",
        "|---|---|---|---|",
        *(
            f"| {row['batch']} | {row['paged_ms']:.1f} | {row['contiguous_ms']:.1f} "
            f"| {row['ratio']:.3f} |"
            for row in rows
        ),
    ]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decode_cpu.md").write_text("\n".join(lines) + "\n")
    (arguments.out / "decode_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's model name."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cores() -> int:
    """Cores this process may use."""
    import os

    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
