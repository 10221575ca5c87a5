"""Paged decode attention against the read ceiling and against other implementations.

    python benchmarks/attention.py [--peers all] [--cells B64x4096 ...] [--out DIR]

Each cell draws random queries, keys and values and a random block table, checks every contender's
output against a float32 reference and then reports its median kernel time (see measure.py), the
bytes of live keys and values per second, and their share of what a kernel that only reads got in
the same run. A contender with variants (numbers of splits) is represented by its fastest. Results
go to DIR (benchmarks/results) as JSON and PNG, the JSON after every measurement.
"""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measure
import numpy as np
import peers
from peers import Call, Case

from paged_kv_jax.kernels import attention_reference

MAX_RELATIVE_ERROR = 1e-2  # of the output, in the Frobenius norm; bfloat16 rounding gives 2e-3


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload: the lengths of its rows, its heads, its pool. One query token a row."""

    name: str
    lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values that the rows see, in bfloat16."""
        return 2 * sum(self.lens) * self.num_kv_heads * self.head_dim * 2


CELLS = [
    Cell("B1x32768", (32768,)),
    Cell("B8x8192", (8192,) * 8),
    Cell("B8x32768", (32768,) * 8),
    Cell("B64x4096", (4096,) * 64),
    Cell("B64x4096-block64", (4096,) * 64, block_size=64),
    Cell("B128x1024", (1024,) * 128),
    Cell("B256x4096", (4096,) * 256),
    Cell("B64-skewed", tuple(max(512, 32768 // rank) for rank in range(1, 65))),
    Cell("B32x4096-64/8", (4096,) * 32, num_heads=64),
    Cell("B64x8192-32/1", (8192,) * 64, num_kv_heads=1),
    Cell("B64x4096-9/3x64", (4096,) * 64, num_heads=9, num_kv_heads=3, head_dim=64),
]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def make_case(cell: Cell) -> Case:
    """Random tensors, the same for the same cell."""
    blocks = [-(-n // cell.block_size) for n in cell.lens]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    table = np.full((len(blocks), max(blocks)), -1, np.int32)
    first = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[first : first + count]
        first += count

    pool_shape = (1, sum(blocks), cell.block_size, cell.num_kv_heads, cell.head_dim)
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    return Case(
        q=_normal(q_key, (len(blocks), cell.num_heads, cell.head_dim)),
        k_pool=_normal(k_key, pool_shape),
        v_pool=_normal(v_key, pool_shape),
        block_table=jnp.asarray(table),
        kv_lens=jnp.asarray(cell.lens, jnp.int32),
        cu_q_lens=jnp.arange(len(blocks) + 1, dtype=jnp.int32),
        lens=cell.lens,
    )


@jax.jit
def _reference(q, k_pool, v_pool, block_table, kv_lens):
    def one_row(row):
        q, table, kv_len = row
        cu_q_lens = jnp.array([0, 1], jnp.int32)
        return attention_reference.paged_attention(
            q[None].astype(jnp.float32),
            k_pool,
            v_pool,
            0,
            table[None],
            kv_len[None],
            cu_q_lens,
            max_query_len=1,
            scale=1 / math.sqrt(q.shape[-1]),
        )[0][0]

    return jax.lax.map(one_row, (q, block_table, kv_lens))  # a row at a time: rows are large


def reference(case: Case) -> jax.Array:
    """Dense float32 attention, [T, H, D]."""
    return _reference(case.q, case.k_pool, case.v_pool, case.block_table, case.kv_lens)


def _ours(kernel: str) -> Callable[[Case], list[Call]]:
    def contender(case: Case) -> list[Call]:
        if kernel == "mosaic_gpu":
            from paged_kv_jax.kernels.decode_mosaic_gpu import paged_attention
        else:
            from paged_kv_jax.kernels.triton import paged_attention

        args = (case.q, case.k_pool, case.v_pool, jnp.int32(0))
        args += (case.block_table, case.kv_lens, case.cu_q_lens)
        attend = functools.partial(paged_attention, max_query_len=1, scale=case.scale)
        compiled = jax.jit(lambda *args: attend(*args)[0]).lower(*args).compile()
        return [lambda: compiled(*args).block_until_ready()]

    return contender


CONTENDERS = {"mosaic_gpu": _ours("mosaic_gpu"), "triton": _ours("triton"), **peers.PEERS}


def run(cell: Cell, case: Case, expected: jax.Array, name: str, read_ceiling: float) -> dict:
    """Check one contender on one cell, then time it. A failure is a result with its error."""
    result: dict = {"cell": dataclasses.asdict(cell) | {"lens": _short(cell.lens)}, "name": name}
    try:
        best = math.inf
        for call in CONTENDERS[name](case):
            difference = jnp.linalg.norm((call().astype(jnp.float32) - expected).ravel())
            error = float(difference / jnp.linalg.norm(expected.ravel()))
            if not error < MAX_RELATIVE_ERROR:
                raise ValueError(f"wrong: relative error {error}")
            time_us = measure.median_us(call)
            if time_us < best:
                best = time_us
                result |= {"time_us": time_us, "relative_error": error}
            if hasattr(call, "plan_us"):
                result["plan_us"] = call.plan_us  # pyright: ignore[reportAttributeAccessIssue]
        speed = cell.live_bytes / best / 1e6
        result |= {"tb_per_s": speed, "share_of_ceiling": speed / read_ceiling}
    except Exception as error:  # whatever a peer raises, the others go on
        result["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    return result


def _short(lens: tuple[int, ...]) -> str:
    return f"{lens[0]} x {len(lens)}" if len(set(lens)) == 1 else ", ".join(map(str, lens))


def show(result: dict) -> str:
    """One line for the terminal."""
    line = f"{result['cell']['name']:20} {result['name']:18}"
    if "error" in result:
        return f"{line} {result['error']}"
    plan = f"  (plan {result['plan_us']:.0f} us)" if "plan_us" in result else ""
    return (
        f"{line} {result['time_us']:9.1f} us {result['tb_per_s']:6.2f} TB/s"
        f" {result['share_of_ceiling']:6.1%}{plan}"
    )


def plot(record: measure.Record, path: pathlib.Path) -> None:
    """Bars of TB/s for each cell and contender, against the read ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [r for r in record.results if "tb_per_s" in r]
    cells = list(dict.fromkeys(r["cell"]["name"] for r in done))
    names = [n for n in CONTENDERS if any(r["name"] == n for r in done)]
    figure, axes = pyplot.subplots(figsize=(1.4 * len(cells) + 2, 5), layout="constrained")
    width = 0.85 / max(1, len(names))
    for i, name in enumerate(names):
        bars = {r["cell"]["name"]: r["tb_per_s"] for r in done if r["name"] == name}
        where = [cells.index(cell) + (i - (len(names) - 1) / 2) * width for cell in bars]
        axes.bar(where, list(bars.values()), width, label=name)
    axes.axhline(record.ceilings["read"], color="black", linestyle="--", label="read ceiling")
    axes.set_xticks(range(len(cells)), cells, rotation=25, ha="right")
    axes.set_ylabel("live keys and values, TB/s")
    axes.set_title(f"Paged decode attention, {record.environment['gpu']}, bfloat16")
    axes.legend(ncols=4, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.25))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the cells and contenders that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=[], choices=["all", *peers.PEERS])
    parser.add_argument("--cells", nargs="*", default=[cell.name for cell in CELLS])
    parser.add_argument("--out", type=pathlib.Path, default=measure.RESULTS)
    options = parser.parse_args()
    cells = [cell for cell in CELLS if cell.name in options.cells]
    names = [n for n in CONTENDERS if n not in peers.PEERS or {n, "all"} & set(options.peers)]

    # FlashInfer compiles on first use; that runs beside the others, and its turn comes last.
    builds = peers.start_builds({c.head_dim for c in cells}) if "flashinfer" in names else []
    record = measure.Record(measure.environment(), measure.ceilings())
    print(record.environment, record.ceilings, sep="\n", flush=True)
    for turn in [[n for n in names if n != "flashinfer"], [n for n in names if n == "flashinfer"]]:
        if turn == ["flashinfer"]:
            for build in builds:
                build.wait()
        for cell in cells if turn else []:
            case = make_case(cell)
            expected = reference(case)
            for name in turn:
                result = run(cell, case, expected, name, record.ceilings["read"])
                record.results.append(result)
                record.save(options.out / "attention.json")
                print(show(result), flush=True)

    print("\nTB/s of live keys and values (share of the read ceiling):")
    by_key = {(r["cell"]["name"], r["name"]): r for r in record.results}
    rows = [[cell.name, *(_cell_text(by_key[cell.name, n]) for n in names)] for cell in cells]
    print(measure.table(["cell", *names], rows))
    plot(record, options.out / "attention.png")


def _cell_text(result: dict) -> str:
    if "error" in result:
        return "-"
    return f"{result['tb_per_s']:.2f} ({result['share_of_ceiling']:.0%})"


if __name__ == "__main__":
    main()
