"""Other implementations of paged attention, each on the tensors that ours gets.

A peer is a function `(case) -> calls`: it prepares whatever the implementation wants to have
prepared (layouts, plans; not timed) and returns the calls to choose the fastest from. It raises
where the implementation refuses the case.
"""

import dataclasses
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_cells import Case, Cell, make_case


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to attend.

    Attributes:
      run: attends and waits; this is timed.
      unpack: out [T, H, D] from what `run` returned; not timed.
      plan_us: time of planning on the host, where the implementation does so for each step.
    """

    run: Callable[[], Any]
    unpack: Callable[[Any], jax.Array] = lambda out: out
    plan_us: float | None = None


def compiled(function: Callable[..., jax.Array], *args) -> Callable[[], jax.Array]:
    """A call of the compiled function that waits for its result."""
    program = jax.jit(function).lower(*args).compile()
    return lambda: program(*args).block_until_ready()


def xla_gather(case: Case) -> list[Call]:
    """Gather every row's table, then softmax, as a model author would write it."""

    def attend(q, k_pool, v_pool, table, kv_lens):
        rows, group = q.shape[0], q.shape[1] // k_pool.shape[3]
        k = k_pool[0, table].reshape(rows, -1, *k_pool.shape[3:])
        v = v_pool[0, table].reshape(rows, -1, *v_pool.shape[3:])
        grouped = q.reshape(rows, k.shape[2], group, q.shape[2])
        scores = jnp.einsum("bkgd,bskd->bkgs", grouped, k, preferred_element_type=jnp.float32)
        sees = jnp.arange(k.shape[1]) < kv_lens[:, None]
        scores = jnp.where(sees[:, None, None], scores * case.scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bkgs,bskd->bkgd", weights, v).reshape(q.shape)

    args = case.q, case.k_pool, case.v_pool, case.table, case.kv_lens
    return [Call(compiled(attend, *args))]


def jax_triton(case: Case) -> list[Call]:
    """JAX's deprecated Pallas Triton op, with a few of its splits; heads-first pools of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as op

    heads_first = [pool[0].transpose(2, 0, 1, 3) for pool in (case.k_pool, case.v_pool)]
    width, block_size = case.table.shape[1], case.k_pool.shape[2]
    calls = []
    for splits in (1, 4, 16):
        if width % splits:
            continue
        blocks = min(width // splits, max(1, 128 // block_size))

        def attend(q, k, v, table, lens, splits=splits, blocks=blocks):
            return op.paged_attention(
                q * case.scale, k, v, table, lens, k_splits=splits, pages_per_compute_block=blocks
            ).reshape(q.shape)

        calls.append(Call(compiled(attend, case.q, *heads_first, case.table, case.kv_lens)))
    return calls


def jax_cudnn(case: Case) -> list[Call]:
    """cuDNN's paged attention through JAX. It wants a pool of exactly B * M blocks."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    rows, width = case.table.shape
    if case.k_pool.shape[1] != rows * width:
        raise ValueError(
            f"refuses a shared pool: N={case.k_pool.shape[1]} blocks for B * M = {rows * width}"
        )

    def attend(q, k, v, table, lens):
        table = table[:, None, :, None]
        out: Any = paged_attention(
            q[:, None],
            k,
            v,
            jnp.ones_like(lens),
            lens,
            table,
            table,
            scale=case.scale,
            mask_type=MaskType.PADDING,
        )
        return (out[0] if isinstance(out, (tuple, list)) else out)[:, 0]

    args = case.q, case.k_pool[0], case.v_pool[0], case.table, case.kv_lens
    return [Call(compiled(attend, *args))]


def cudnn_dense(case: Case) -> list[Call]:
    """cuDNN's attention through `jax.nn`, over contiguous keys and values: a bound, not a peer.

    Rows are padded to the longest, with their lengths as arguments.
    """
    cell = case.cell
    if cell.q_lens != cell.kv_lens:
        raise ValueError("serves whole prompts only: its causal mask starts at the first key")
    padded, place = _padded(case, at_end=True)
    longest = padded.shape[1]
    k, v = (
        pool[0, case.table].reshape(len(cell.kv_lens), -1, *pool.shape[3:])[:, :longest]
        for pool in (case.k_pool, case.v_pool)
    )

    def attend(q, k, v, lens):
        lens = lens if len(cell.kv_lens) > 1 else None
        return jax.nn.dot_product_attention(
            q, k, v, scale=case.scale, is_causal=True, query_seq_lengths=lens,
            key_value_seq_lengths=lens, implementation="cudnn",
        )  # fmt: skip

    return [Call(compiled(attend, padded, k, v, case.kv_lens), lambda out: out[place])]


def _padded(case: Case, *, at_end: bool) -> tuple[jax.Array, tuple[np.ndarray, np.ndarray]]:
    """q as [B, longest row, H, D], and each token's place (row, index) there."""
    q_lens = np.array(case.cell.q_lens)
    longest, rows = q_lens.max(), case.rows
    index = np.arange(rows.size) - (np.cumsum(q_lens) - q_lens)[rows]
    if not at_end:
        index += longest - q_lens[rows]
    padded = jnp.zeros((q_lens.size, longest, *case.q.shape[1:]), case.q.dtype)
    return padded.at[rows, index].set(case.q), (rows, index)


def flash_attention_3(case: Case) -> list[Call]:
    """FlashAttention-3 through flash-attn3-jax, one call for each number of splits.

    Its paged call takes one query length for all rows and aligns queries with the last key, so
    shorter rows are padded in front, where queries see nothing and tiles are skipped.
    """
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    padded, place = _padded(case, at_end=False)

    def with_splits(splits: int) -> Call:
        def attend(q, k, v, table, lens):
            return flash_mha_with_kvcache(
                q,
                k,
                v,
                cache_seqlens=lens,
                page_table=table,
                softmax_scale=case.scale,
                is_causal=True,
                num_splits=splits,
            )

        args = padded, case.k_pool[0], case.v_pool[0], case.table, case.kv_lens
        return Call(compiled(attend, *args), lambda out: out[place])

    few_queries = padded.shape[1] <= 512  # more of them fill the GPU without splits
    return [with_splits(splits) for splits in ((1, 2, 4, 8, 16) if few_queries else (1,))]


def flashinfer(case: Case) -> list[Call]:
    """FlashInfer's decode through torch, on the same memory. Planning, on the host, is apart."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True, backend="fa2"
    )
    rows = range(len(case.cell.kv_lens))
    return [_planned(case, wrapper, *_pages(case, rows, 0, case.cell.kv_lens))]


def flashinfer_prefill(case: Case) -> list[Call]:
    """FlashInfer's paged prefill with its FlashAttention-3 kernels, likewise."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa3")
    pages = _pages(case, range(len(case.cell.kv_lens)), 0, case.cell.kv_lens)
    return [_planned(case, wrapper, _cumulative(case.cell.q_lens), *pages, causal=True)]


def flashinfer_cascade(case: Case) -> list[Call]:
    """FlashInfer's cascade of two levels: the prefixes that rows share, and the rest of each row."""
    from flashinfer import MultiLevelCascadeAttentionWrapper  # pyright: ignore[reportMissingImports]

    cell = case.cell
    wrapper = MultiLevelCascadeAttentionWrapper(2, _workspace(), "NHD")
    rows = range(len(cell.kv_lens))
    first_rows = rows[:: cell.sharers]
    queries = [sum(cell.q_lens[row : row + cell.sharers]) for row in first_rows]
    own_lens = [n - cell.shared for n in cell.kv_lens]
    own_start = cell.shared // cell.block_size
    levels = (
        (_cumulative(queries), *_pages(case, first_rows, 0, [cell.shared] * len(first_rows))),
        (_cumulative(cell.q_lens), *_pages(case, rows, own_start, own_lens)),
    )
    return [_planned(case, wrapper, *map(list, zip(*levels, strict=True)), causal=True)]


def _workspace() -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    return torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")


def _cumulative(lens: Sequence[int]) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    return torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32).cuda()


def _pages(case: Case, rows: Sequence[int], first: int, lens: Sequence[int]) -> list[Any]:
    """What FlashInfer's plans take: offsets of the rows' blocks, the blocks, tokens in the last.

    `lens[i]` tokens of `rows[i]`, from column `first` of the table on.
    """
    import torch  # pyright: ignore[reportMissingImports]

    block_size = case.cell.block_size
    blocks = [-(-n // block_size) for n in lens]
    table = np.asarray(case.table)
    indices = np.concatenate(
        [table[row, first : first + n] for row, n in zip(rows, blocks, strict=True)]
    )
    last = [(n - 1) % block_size + 1 for n in lens]
    return [
        _cumulative(blocks),
        torch.tensor(indices).cuda(),
        torch.tensor(last, dtype=torch.int32).cuda(),
    ]


def _planned(case: Case, wrapper: Any, *arguments: Any, **options: Any) -> Call:
    """A planned FlashInfer wrapper's call, and how long planning takes."""
    import torch  # pyright: ignore[reportMissingImports]

    q, k, v = (torch.from_dlpack(x) for x in (case.q, case.k_pool[0], case.v_pool[0]))
    cell = case.cell

    def plan() -> None:
        wrapper.plan(
            *arguments, cell.num_heads, cell.num_kv_heads, cell.head_dim, cell.block_size,
            q_data_type=q.dtype, kv_data_type=k.dtype, sm_scale=case.scale, **options,
        )  # fmt: skip

    def run() -> Any:
        out = wrapper.run(q, (k, v))
        torch.cuda.synchronize()
        return out

    plan()  # builds the kernels on first use
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    return Call(run, jnp.from_dlpack, 1e6 * (time.perf_counter() - start))


Peer = Callable[[Case], list[Call]]
PEERS: dict[str, dict[str, Peer]] = {
    "decode": {
        "xla_gather": xla_gather,
        "jax_triton": jax_triton,
        "jax_cudnn": jax_cudnn,
        "flash_attention_3": flash_attention_3,
        "flashinfer": flashinfer,
    },
    "prefill": {
        "cudnn_dense": cudnn_dense,
        "flash_attention_3": flash_attention_3,
        "flashinfer": flashinfer_prefill,
    },
    "cascade": {"flashinfer": flashinfer, "flashinfer cascade": flashinfer_cascade},
}


Builds = dict[tuple[str, int], subprocess.Popen]  # by kind of cell and head_dim


def start_builds(kinds_and_head_dims: set[tuple[str, int]]) -> Builds:
    """Compile FlashInfer's kernels in the background: it does so on first use, for minutes."""
    return {
        (kind, head_dim): subprocess.Popen([sys.executable, __file__, kind, str(head_dim)])
        for kind, head_dim in kinds_and_head_dims
    }


def finish_builds(builds: Builds, seconds: float) -> set[tuple[str, int]]:
    """Wait until the builds are done, or so long; says which did not succeed, and returns them."""
    failed = set()
    deadline = time.monotonic() + seconds
    for key, build in builds.items():
        try:
            how = f"ended with {build.wait(max(0.0, deadline - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            build.kill()
            build.wait()
            how = f"took more than {seconds:.0f} s longer than everything else"
        if build.returncode != 0:
            failed.add(key)
            print(f"FlashInfer is left out of {key[0]} at head_dim {key[1]}: its build {how}")
    return failed


def _build(kind: str, head_dim: int) -> None:
    case = make_case(
        Cell("build", (35,), num_heads=1, num_kv_heads=1, head_dim=head_dim, shared=16)
    )
    for name, peer in PEERS[kind].items():
        if name.startswith("flashinfer"):
            for call in peer(case):
                call.run()


if __name__ == "__main__":
    _build(sys.argv[1], int(sys.argv[2]))
