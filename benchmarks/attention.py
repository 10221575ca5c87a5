"""Paged attention against the read ceiling, the tensor cores and other implementations.

    python benchmarks/attention.py [--kind decode] [--peers all] [--cells B64x4096 ...] [--out DIR]

Three kinds of cells (attention_cells.py): decode, in TB/s of live keys and values and their share
of what a kernel that only reads got in the same run; prefill, chunks and mixed batches, in useful
TFLOP/s and their share of the tensor cores' peak; and cascade, decode over a prefix that all rows
share, with and without computing it once.

Each cell draws random queries, keys and values and a random block table, checks every contender's
output against a float32 reference (at some query tokens where there are many) and then reports its
median kernel time (see measure.py). A contender with variants (numbers of splits) is represented by
its fastest. Results go to DIR (benchmarks/results) as attention_<kind>.json and .png, the JSON after
every measurement.
"""

import argparse
import functools
import math
import os
import pathlib
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measure
import numpy as np
import peers
from attention_cells import CELLS, Case, Cell, checked_tokens, make_case, reference
from peers import Call, Peer

import paged_kv_jax as pkv

MAX_RELATIVE_ERROR = 1e-2  # of the output, in the Frobenius norm; bfloat16 rounding gives 2e-3
PEAK_TFLOPS = 989.0  # dense bfloat16 of an H100 or H200 SXM, by NVIDIA's data sheet
BUILD_SECONDS = 240  # to wait for FlashInfer's kernels when everyone else is done
ITERATIONS = {"decode": 15, "prefill": 7, "cascade": 15}
# What is plotted and tabulated of each kind: key, unit, and the line to compare it with.
METRICS = {
    "decode": ("tb_per_s", "live keys and values, TB/s", "read ceiling"),
    "prefill": ("tflop_per_s", "useful TFLOP/s", "peak of the tensor cores"),
    "cascade": ("time_us", "kernel time, us", None),
}


def _ours(implementation: str, *, shared_prefix: bool = False) -> Peer:
    def contender(case: Case) -> list[Call]:
        def attend(q, k_pool, v_pool, plan, layer):
            pool = pkv.KVPool(k=k_pool, v=v_pool)
            return pkv.paged_attention(q, pool, layer, plan, implementation=implementation)

        plan = jax.jit(functools.partial(case.plan, shared_prefix=shared_prefix))()
        args = case.q, case.k_pool, case.v_pool, plan, jnp.int32(0)
        return [Call(peers.compiled(attend, *args))]

    return contender


OURS = {
    "decode": {"mosaic_gpu": _ours("mosaic_gpu"), "triton": _ours("triton")},
    "prefill": {"mosaic_gpu": _ours("mosaic_gpu"), "xla": _ours("xla")},
    "cascade": {
        "mosaic_gpu": _ours("mosaic_gpu"),
        "mosaic_gpu cascade": _ours("mosaic_gpu", shared_prefix=True),
    },
}
CONTENDERS = {kind: ours | peers.PEERS[kind] for kind, ours in OURS.items()}


def run(
    kind: str, name: str, case: Case, tokens: np.ndarray, expected: jax.Array, read_ceiling: float
) -> dict:
    """Check one contender on one cell, then time it. A failure is a result with its error.

    Args:
      kind, name: a contender.
      case: the cell's tensors.
      tokens: int [C], the query tokens to check.
      expected: [C, H, D], what they should be.
      read_ceiling: TB/s.
    """
    cell = case.cell
    result: dict = {"cell": cell.record(), "name": name}
    try:
        best = math.inf
        for call in CONTENDERS[kind][name](case):
            out = call.unpack(call.run())[tokens].astype(jnp.float32)
            error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
            if not error < MAX_RELATIVE_ERROR:
                raise ValueError(f"wrong: relative error {error}")
            time_us = measure.median_us(call.run, ITERATIONS[kind])
            if call.plan_us is not None:
                result["plan_us"] = call.plan_us
            if time_us < best:
                best = time_us
                result |= {"time_us": time_us, "relative_error": error}
        if kind == "prefill":
            speed = cell.flops / best / 1e6
            result |= {"tflop_per_s": speed, "share_of_peak": speed / PEAK_TFLOPS}
        elif kind == "decode":
            speed = cell.live_bytes / best / 1e6
            result |= {"tb_per_s": speed, "share_of_ceiling": speed / read_ceiling}
    except Exception as error:  # whatever a peer raises, the others go on
        result["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    return result


def over_parts(results: list[dict]) -> list[dict]:
    """For each cell with parts and contender, its time over the sum of its parts' times."""
    times = {(r["cell"]["name"], r["name"]): r["time_us"] for r in results if "time_us" in r}
    ratios = []
    for result in results:
        parts = [(part, result["name"]) for part in result["cell"]["parts"]]
        if parts and "time_us" in result and all(part in times for part in parts):
            ratio = result["time_us"] / sum(times[part] for part in parts)
            ratios.append({"cell": result["cell"]["name"], "name": result["name"], "ratio": ratio})
    return ratios


def speedups(results: list[dict]) -> list[dict]:
    """For each cell and contender "x cascade", x's time over its own."""
    times = {(r["cell"]["name"], r["name"]): r["time_us"] for r in results if "time_us" in r}
    return [
        {"cell": cell, "name": name, "speedup": times[cell, plain] / time_us}
        for (cell, name), time_us in times.items()
        if (plain := name.removesuffix(" cascade")) != name and (cell, plain) in times
    ]


def show(result: dict) -> str:
    """One line for the terminal."""
    line = f"{result['cell']['name']:20} {result['name']:18}"
    if "error" in result:
        return f"{line} {result['error']}"
    plan = f"  (plan {result['plan_us']:.0f} us)" if "plan_us" in result else ""
    return f"{line} {_time_or_speed(result)}{plan}"


def _time_or_speed(result: dict) -> str:
    if "error" in result:
        return "-"
    time = f"{result['time_us']:.1f} us"
    if "tflop_per_s" in result:
        return f"{time} {result['tflop_per_s']:.0f} TFLOP/s ({result['share_of_peak']:.0%})"
    if "tb_per_s" in result:
        return f"{time} {result['tb_per_s']:.2f} TB/s ({result['share_of_ceiling']:.0%})"
    return time


def plot(kind: str, record: measure.Record, path: pathlib.Path) -> None:
    """Bars for each cell and contender, against what the hardware could do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    key, unit, line = METRICS[kind]
    done = [r for r in record.results if key in r]
    cells = list(dict.fromkeys(r["cell"]["name"] for r in done))
    names = [n for n in CONTENDERS[kind] if any(r["name"] == n for r in done)]
    figure, axes = pyplot.subplots(figsize=(1.4 * len(cells) + 2, 5), layout="constrained")
    width = 0.85 / max(1, len(names))
    for i, name in enumerate(names):
        bars = {r["cell"]["name"]: r[key] for r in done if r["name"] == name}
        where = [cells.index(cell) + (i - (len(names) - 1) / 2) * width for cell in bars]
        axes.bar(where, list(bars.values()), width, label=name)
    if line is not None:
        limit = record.ceilings["read"] if kind == "decode" else PEAK_TFLOPS
        axes.axhline(limit, color="black", linestyle="--", label=line)
    axes.set_xticks(range(len(cells)), cells, rotation=25, ha="right")
    axes.set_ylabel(unit)
    axes.set_title(f"Paged attention, {kind}, {record.environment['gpu']}, bfloat16")
    axes.legend(ncols=4, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.25))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def measure_kind(
    kind: str, cells: list[Cell], names: list[str], record: measure.Record, path: pathlib.Path
) -> None:
    """Fill the record with all contenders on all cells, and save it after each."""
    for cell in cells:
        chosen = [n for n in names if not cell.contenders or n in cell.contenders]
        if not chosen:
            continue
        case = make_case(cell)
        tokens = checked_tokens(case)
        expected = reference(case, tokens)
        for name in chosen:
            result = run(kind, name, case, tokens, expected, record.ceilings["read"])
            record.results.append(result)
            record.save(path)
            print(show(result), flush=True)


def report(kind: str, record: measure.Record, out: pathlib.Path) -> None:
    """The table of one kind on the terminal, and its picture."""
    by_key = {(r["cell"]["name"], r["name"]): r for r in record.results}
    cells = list(dict.fromkeys(cell for cell, _ in by_key))
    names = [n for n in CONTENDERS[kind] if any(name == n for _, name in by_key)]
    rows = [
        [cell, *(_time_or_speed(by_key.get((cell, n), {"error": "not asked"})) for n in names)]
        for cell in cells
    ]
    print(f"\n{kind}\n{measure.table(['cell', *names], rows)}", flush=True)
    for ratio in over_parts(record.results):
        print(f"{ratio['cell']}, {ratio['name']}: {ratio['ratio']:.2f} times its parts' times")
    for gain in speedups(record.results):
        print(f"{gain['cell']}, {gain['name']}: {gain['speedup']:.2f} times as fast")
    plot(kind, record, out / f"attention_{kind}.png")


def main(arguments: list[str] | None = None) -> None:
    """Run the cells and contenders that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    all_peers = dict.fromkeys(name for kind in peers.PEERS.values() for name in kind)
    parser.add_argument("--kind", default="all", choices=["all", *CELLS])
    parser.add_argument("--peers", nargs="*", default=[], choices=["all", *all_peers])
    parser.add_argument("--cells", nargs="*", metavar="CELL", help="by name; all if not given")
    parser.add_argument("--out", type=pathlib.Path, default=measure.RESULTS)
    options = parser.parse_args(arguments)
    known = [cell.name for cells in CELLS.values() for cell in cells]
    if unknown := set(options.cells or ()) - set(known):
        parser.error(f"no such cells: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    kinds = list(CELLS) if options.kind == "all" else [options.kind]
    chosen = {
        kind: [c for c in CELLS[kind] if not options.cells or c.name in options.cells]
        for kind in kinds
    }
    chosen = {kind: cells for kind, cells in chosen.items() if cells}
    names = {
        kind: [n for n in CONTENDERS[kind] if n in OURS[kind] or {n, "all"} & set(options.peers)]
        for kind in chosen
    }

    # FlashInfer compiles on first use; that runs beside the others, and its turn comes last.
    late = {kind: [n for n in names[kind] if n.startswith("flashinfer")] for kind in chosen}
    builds = peers.start_builds(
        {(kind, cell.head_dim) for kind in chosen if late[kind] for cell in chosen[kind]}
    )
    environment, ceilings = measure.environment(), measure.ceilings()
    print(environment, ceilings, sep="\n", flush=True)
    records = {kind: measure.Record(environment, ceilings) for kind in chosen}
    failed_builds = set()
    for is_late in (False, True):
        if is_late:
            failed_builds = peers.finish_builds(builds, BUILD_SECONDS)
        for kind, cells in chosen.items():
            cells = [c for c in cells if (kind, c.head_dim) not in failed_builds]
            turn = [n for n in names[kind] if (n in late[kind]) == is_late]
            path = options.out / f"attention_{kind}.json"
            measure_kind(kind, cells, turn, records[kind], path)
    for kind, record in records.items():
        report(kind, record, options.out)


if __name__ == "__main__":
    main()
