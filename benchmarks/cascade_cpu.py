"""Decode attention over prefixes that rows share, computed once or row by row, on the CPU.

The cells of the attention benchmark's cascade with smaller heads in float32, through `xla`; the plan
is included, since finding what rows share is its work. Runs alternate, so that a noisy machine
disturbs both alike, and both must give the same output but for rounding.

    python benchmarks/cascade_cpu.py            # writes benchmarks/results/cascade_cpu.{md,json}
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from allocator_step import processor
from attention_cells import CASCADE, Cell, make_case

import paged_kv_jax as pkv

HEADS = dict(num_heads=4, num_kv_heads=2, head_dim=64)
CELLS = [
    dataclasses.replace(cell, **HEADS)
    for cell in (*CASCADE, Cell("B64x2304, nothing shared", (2304,) * 64))
]


def compare(cell: Cell, repeats: int) -> dict[str, float | str]:
    """Median milliseconds of planning and attending, row by row and with the prefix once."""
    case = make_case(cell)
    q, k, v = (x.astype(np.float32) for x in (case.q, case.k_pool, case.v_pool))

    @functools.partial(jax.jit, static_argnames="shared_prefix")
    def attend(q, k, v, block_table, kv_lens, *, shared_prefix):
        plan = pkv.plan_from_tables(
            block_table, kv_lens, 1, block_size=cell.block_size, shared_prefix=shared_prefix
        )
        return pkv.paged_attention(q, pkv.KVPool(k=k, v=v), 0, plan)

    times, outputs = {False: [], True: []}, {}
    for _ in range(repeats + 1):  # the first compiles
        for shared_prefix, taken in times.items():
            start = time.perf_counter()
            out = attend(q, k, v, case.block_table, case.kv_lens, shared_prefix=shared_prefix)
            outputs[shared_prefix] = np.asarray(out)
            taken.append(1e3 * (time.perf_counter() - start))
    np.testing.assert_allclose(outputs[True], outputs[False], rtol=1e-5, atol=1e-6)
    plain, cascade = times[False][1:], times[True][1:]
    return {
        "cell": cell.name,
        "plain_ms": statistics.median(plain),
        "cascade_ms": statistics.median(cascade),
        "speedup": statistics.median(a / b for a, b in zip(plain, cascade, strict=True)),
    }


def main() -> None:
    """Run, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    arguments = parser.parse_args()
    rows = [compare(cell, arguments.repeats) for cell in CELLS]
    record = {
        "hardware": f"{processor()} ({os.cpu_count()} cores)",
        "versions": f"JAX {jax.__version__}, Python {platform.python_version()}",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    lines = [
        "# Decode over shared prefixes, `xla` on the CPU, float32, 4/2 heads, head_dim 64, block_size 16",
        "",
        f"{record['hardware']}; {record['versions']}; `{record['command']}`; {record['date']}",
        "",
        "B64x8192+512 is 64 rows that share 8,192 tokens and have 512 of their own; 16x16x2048+256 is "
        "16 prompts of 2,048 tokens with 16 samples each. Plan included. Both take turns; the last "
        "column is the median of the ratios of one turn, the others are medians of times, on a machine "
        "that may have had other work.",
        "",
        "| cell | row by row, ms | prefix once, ms | times as fast |",
        "|---|--:|--:|--:|",
        *(
            f"| {row['cell']} | {row['plain_ms']:.1f} | {row['cascade_ms']:.1f} "
            f"| {row['speedup']:.2f} |"
            for row in rows
        ),
    ]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cascade_cpu.md").write_text("\n".join(lines) + "\n")
    (arguments.out / "cascade_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
