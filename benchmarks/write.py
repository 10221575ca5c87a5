"""KV writes and block copies against the copy ceiling and against XLA's scatter.

    python benchmarks/write.py [--out DIR]

Reports median kernel times (see measure.py) of operations that update a 2 GiB pair of pools in
place, inside one compiled loop over different random slots; TB/s count each byte read and each
byte written. Each contender is compared with XLA's result, bit for bit, before it is timed.
Results go to DIR (benchmarks/results) as JSON.
"""

import argparse
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measure
import numpy as np

from paged_kv_jax.kernels import copy_mosaic_gpu, triton, write_mosaic_gpu, write_xla

POOL_SHAPE = (4, 8192, 16, 8, 128)  # [L, N, P, K, D], 1 GiB each for K and V in bfloat16
STEPS = 10  # calls in one compiled loop

# name -> (function, part of its kernel's name)
WRITES = {
    "mosaic_gpu": (write_mosaic_gpu.write, "paged_kv_write"),
    "triton": (triton.write, "paged_kv_write"),
    "xla": (write_xla.write, ""),
}
COPIES = {
    "mosaic_gpu": (copy_mosaic_gpu.copy_blocks, "paged_kv_copy"),
    "xla": (write_xla.copy_blocks, ""),
}


def write_cell(num_tokens: int) -> tuple[list, Callable, int]:
    """Arguments of each step, how a step calls a contender, and the bytes a step moves."""
    num_slots = POOL_SHAPE[1] * POOL_SHAPE[2]
    k, v = jax.random.normal(jax.random.key(1), (2, num_tokens, *POOL_SHAPE[3:]), jnp.bfloat16)
    rng = np.random.default_rng(2)
    slots = [rng.permutation(num_slots)[:num_tokens].astype(np.int32) for _ in range(STEPS)]

    def step(function, pools, layer, arguments):
        k, v, slots = arguments
        return function(*pools, layer % POOL_SHAPE[0], k, v, slots)

    per_step = [(k, v, jnp.asarray(step_slots)) for step_slots in slots]
    return per_step, step, 4 * k.nbytes


def copy_cell(num_pairs: int) -> tuple[list, Callable, int]:
    """As `write_cell`, for `copy_blocks`."""
    rng = np.random.default_rng(3)
    ids = [rng.permutation(POOL_SHAPE[1])[: 2 * num_pairs].astype(np.int32) for _ in range(STEPS)]

    def step(function, pools, layer, arguments):
        del layer  # all layers
        return function(*pools, *arguments)

    block_bytes = 2 * POOL_SHAPE[2] * POOL_SHAPE[3] * POOL_SHAPE[4] * POOL_SHAPE[0] * 2
    per_step = [(jnp.asarray(i[:num_pairs]), jnp.asarray(i[num_pairs:])) for i in ids]
    return per_step, step, 2 * num_pairs * block_bytes


def run(name: str, cell: tuple[list, Callable, int], contenders: dict) -> list[dict]:
    """Check and time every contender of one cell. A failure is a result with its error."""
    per_step, step, moved = cell
    results, expected = [], None
    for contender in ["xla", *(c for c in contenders if c != "xla")]:
        function, kernel = contenders[contender]
        result: dict = {"cell": name, "name": contender}

        @functools.partial(jax.jit, donate_argnums=0)
        def all_steps(pools, per_step, function=function):
            for layer, arguments in enumerate(per_step):
                pools = step(function, pools, jnp.int32(layer), arguments)
            return pools

        try:
            pools = all_steps(_pools(), per_step)
            if expected is None:
                expected = pools
            same = [bool(jnp.array_equal(a, b)) for a, b in zip(pools, expected, strict=True)]
            if not all(same):
                raise ValueError(f"differs from XLA's result: {same}")
            holder = [jax.tree.map(jnp.copy, pools)]
            del pools

            def call(holder=holder, all_steps=all_steps):
                holder[0] = jax.block_until_ready(all_steps(holder[0], per_step))

            # XLA's step may be several kernels, and ours may come with small ones beside it.
            calls = measure.kernel_times(call, 5)
            total = statistics.median(sum(ms for _, ms in kernels) for kernels in calls)
            own = statistics.median(
                sum(ms for n, ms in kernels if kernel in n) for kernels in calls
            )
            result |= {"time_us": 1e3 * own / STEPS, "all_kernels_us": 1e3 * total / STEPS}
            result["tb_per_s"] = moved / result["time_us"] / 1e6
        except Exception as error:  # the others go on
            result["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        results.append(result)
    return results


def _pools() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(POOL_SHAPE, jnp.bfloat16), jnp.zeros(POOL_SHAPE, jnp.bfloat16)


def main() -> None:
    """Run every cell with every contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=measure.RESULTS)
    options = parser.parse_args()
    record = measure.Record(measure.environment(), measure.ceilings())
    print(record.environment, record.ceilings, sep="\n", flush=True)
    cells = {
        "write 256 tokens": (write_cell(256), WRITES),
        "write 65536 tokens": (write_cell(65536), WRITES),
        "copy 1 block": (copy_cell(1), COPIES),
        "copy 1024 blocks": (copy_cell(1024), COPIES),
    }
    for name, (cell, contenders) in cells.items():
        for result in run(name, cell, contenders):
            if "tb_per_s" in result:
                result["share_of_ceiling"] = result["tb_per_s"] / record.ceilings["copy"]
            record.results.append(result)
            record.save(options.out / "write.json")
            print(result, flush=True)
    rows = [
        [
            r["cell"],
            r["name"],
            f"{r['time_us']:.2f}",
            f"{r['all_kernels_us']:.2f}",
            f"{r['tb_per_s']:.2f}",
            f"{r['share_of_ceiling']:.0%}",
        ]
        for r in record.results
        if "error" not in r
    ]
    header = ["cell", "contender", "kernel us", "all kernels us", "TB/s", "of copy ceiling"]
    print(measure.table(header, rows))


if __name__ == "__main__":
    main()
