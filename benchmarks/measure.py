"""What every benchmark here shares: kernel times by CUPTI, the memory ceilings of the run, records.

A time is the sum of the durations of all GPU kernels that one call launched, as CUPTI's activity
records give them, so neither the host's launch overhead nor the gaps between kernels count, for
us and for every peer alike (CUPTI sees the kernels of JAX and of torch in the same process).
Before each timed call a kernel reads 256 MiB, so that no call finds its keys and values in L2.
"""

import dataclasses
import datetime
import functools
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

RESULTS = pathlib.Path(__file__).parent / "results"
FLUSH_BYTES = 256 * 2**20
CEILING_BYTES = 4 * 2**30


def _stream_kernel(src, dst, smem, barriers, *, num_ctas: int, copies: bool):
    """Each CTA streams every num_ctas-th chunk through a ring of SMEM buffers, `copies` or not."""
    chunk_rows, stages = smem.shape[1], smem.shape[0]
    cta = jax.lax.axis_index("cta")
    num_chunks = src.shape[0] // chunk_rows
    steps = (num_chunks - cta + num_ctas - 1) // num_ctas

    def rows(step):
        return pl.ds((cta + step * num_ctas) * chunk_rows, chunk_rows)

    def load(step):
        stage = jax.lax.rem(step, stages)
        plgpu.copy_gmem_to_smem(src.at[rows(step)], smem.at[stage], barriers.at[stage])

    ahead = stages - 1 if copies else stages

    @pl.loop(0, jnp.minimum(ahead, steps))
    def _fill(step):
        load(step)

    @pl.loop(0, steps)
    def _stream(step):
        stage = jax.lax.rem(step, stages)
        plgpu.barrier_wait(barriers.at[stage])
        if copies:
            plgpu.copy_smem_to_gmem(smem.at[stage], dst.at[rows(step)])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # frees the stage before this one

        @pl.when(step + ahead < steps)
        def _next():
            load(step + ahead)

    if copies:
        plgpu.wait_smem_to_gmem(0)
    else:
        dst[cta] = smem[0, 0, 0]


@functools.partial(jax.jit, static_argnames=("copies", "ctas_per_sm"))
def stream(src: jax.Array, *, copies: bool = False, ctas_per_sm: int = 2) -> jax.Array:
    """Read `src` [R, 128] float32 once through TMA and, with `copies`, write it to the result."""
    num_ctas = ctas_per_sm * jax.devices()[0].core_count
    smem = plgpu.SMEM((6 // ctas_per_sm, 64, 128), jnp.float32)
    barriers = plgpu.Barrier(num_barriers=6 // ctas_per_sm)

    def body(src, dst):
        kernel = functools.partial(_stream_kernel, num_ctas=num_ctas, copies=copies)
        pl.run_scoped(functools.partial(kernel, src, dst), smem, barriers)

    launch: Any = pl.kernel(
        body,
        jax.ShapeDtypeStruct(src.shape if copies else (num_ctas,), src.dtype),
        mesh=plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",)),
        compiler_params=plgpu.CompilerParams(),
        name="stream",
    )
    return launch(src)


def _buffer(num_bytes: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (num_bytes // 512, 128), jnp.float32)


@functools.cache
def _flush_buffer() -> jax.Array:
    return _buffer(FLUSH_BYTES)


def kernel_times(call: Callable[[], object], iterations: int = 15) -> list[list[tuple[str, float]]]:
    """The kernels of each of `iterations` calls, as (name, milliseconds), in order of launch.

    `call` must wait for its own kernels.
    """
    flush = _flush_buffer()
    stream(flush).block_until_ready()
    call()  # compiles
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore
    cupti._cupti_init()
    try:
        for _ in range(iterations):
            stream(flush).block_until_ready()
            call()
    finally:
        records = cupti._cupti_get_timings(True)
    per_call, left_over = divmod(len(records), iterations)
    calls = [records[i : i + per_call] for i in range(0, len(records), max(1, per_call))]
    if left_over or per_call < 2 or len({kernels[0][0] for kernels in calls}) > 1:
        raise RuntimeError(f"{len(records)} kernels in {iterations} calls: not the same in each")
    return [kernels[1:] for kernels in calls]  # the first is the flush


def median_us(call: Callable[[], object], iterations: int = 15, kernel: str = "") -> float:
    """Median kernel time of one call, in microseconds; only of kernels with `kernel` in the name."""
    return 1e3 * statistics.median(
        sum(ms for name, ms in kernels if kernel in name)
        for kernels in kernel_times(call, iterations)
    )


def ceilings() -> dict[str, float]:
    """Bytes moved per second, in TB/s, by pure streaming: read, and copy (read plus written)."""
    src = _buffer(CEILING_BYTES)
    negate = jax.jit(lambda x: -x)
    read = [
        median_us(lambda n=n: stream(src, ctas_per_sm=n).block_until_ready(), 5) for n in (1, 2, 3)
    ]
    copy = [
        median_us(lambda n=n: stream(src, copies=True, ctas_per_sm=n).block_until_ready(), 5)
        for n in (1, 2, 3)
    ]
    copy.append(median_us(lambda: negate(src).block_until_ready(), 5))
    print("ceilings, us:", read, copy)
    return {"read": src.nbytes / min(read) / 1e6, "copy": 2 * src.nbytes / min(copy) / 1e6}


def environment() -> dict[str, str]:
    """The hardware, versions, command and date that a result must name."""
    query = "--query-gpu=name,driver_version"
    gpu, driver = (
        subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
        )
        .stdout.splitlines()[0]
        .split(", ")
    )
    return {
        "gpu": gpu,
        "driver": driver,
        "jax": jax.__version__,
        "cuda": jax.devices()[0].client.platform_version.replace("\n", " "),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@dataclasses.dataclass
class Record:
    """One run: where and when, its ceilings (TB/s), and one entry a measurement."""

    environment: dict[str, str]
    ceilings: dict[str, float]
    results: list[dict] = dataclasses.field(default_factory=list)

    def save(self, path: pathlib.Path) -> None:
        """Write the record as JSON; called after each result, so that a stopped run keeps its own."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells as aligned text."""
    cells = [[str(c) for c in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )
