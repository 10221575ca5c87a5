"""Other implementations of paged decode attention, each on the tensors that ours gets.

A peer is a function `(case) -> call`: it prepares whatever the implementation wants to have
prepared (layouts, plans; not timed) and returns a function that attends, waits and returns
out [T, H, D] as a JAX array. It raises where the implementation refuses the case.
"""

import dataclasses
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one cell: decode, one query token a row (T == B)."""

    q: jax.Array  # [T, H, D]
    k_pool: jax.Array  # [1, N, P, K, D]
    v_pool: jax.Array
    block_table: jax.Array  # int32 [B, M], -1 for "no block"
    kv_lens: jax.Array  # int32 [B]
    cu_q_lens: jax.Array  # int32 [B + 1]
    lens: tuple[int, ...]  # kv_lens, on the host

    @property
    def scale(self) -> float:
        """Of the logits."""
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def table(self) -> jax.Array:
        """The block table with 0 for -1: peers may read the entries past a row's length."""
        return jnp.maximum(self.block_table, 0)


Call = Callable[[], jax.Array]


def _waiting(function: Callable[..., jax.Array], *args) -> Call:
    compiled = jax.jit(function).lower(*args).compile()
    return lambda: compiled(*args).block_until_ready()


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

    return [_waiting(attend, case.q, case.k_pool, case.v_pool, case.table, case.kv_lens)]


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

        calls.append(_waiting(attend, case.q, *heads_first, case.table, case.kv_lens))
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

    return [_waiting(attend, case.q, case.k_pool[0], case.v_pool[0], case.table, case.kv_lens)]


def flash_attention_3(case: Case) -> list[Call]:
    """FlashAttention-3 through flash-attn3-jax, one call for each number of splits."""
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    def with_splits(splits: int) -> Call:
        def attend(q, k, v, table, lens):
            out = flash_mha_with_kvcache(
                q[:, None],
                k,
                v,
                cache_seqlens=lens,
                page_table=table,
                softmax_scale=case.scale,
                is_causal=True,
                num_splits=splits,
            )
            return out[:, 0]

        pools = case.k_pool[0], case.v_pool[0]
        return _waiting(attend, case.q, *pools, case.table, case.kv_lens)

    return [with_splits(splits) for splits in (1, 2, 4, 8, 16)]


def flashinfer(case: Case) -> list[Call]:
    """FlashInfer through torch, on the same memory. Planning, on the host, is reported apart."""
    import torch  # pyright: ignore[reportMissingImports]
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    q, k, v = (torch.from_dlpack(x) for x in (case.q, case.k_pool[0], case.v_pool[0]))
    block_size = k.shape[1]
    blocks = [-(-n // block_size) for n in case.lens]
    table = torch.from_dlpack(case.table).cpu()
    indices = torch.cat([table[row, :count] for row, count in enumerate(blocks)]).cuda()
    indptr = torch.tensor([0, *torch.tensor(blocks).cumsum(0).tolist()], dtype=torch.int32).cuda()
    last = torch.tensor([(n - 1) % block_size + 1 for n in case.lens], dtype=torch.int32).cuda()
    workspace = torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )

    def plan() -> None:
        wrapper.plan(
            indptr,
            indices,
            last,
            q.shape[1],
            k.shape[2],
            q.shape[2],
            block_size,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
            sm_scale=case.scale,
        )

    plan()  # builds the kernels on first use
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    plan_us = 1e6 * (time.perf_counter() - start)
    out = torch.empty_like(q)

    def call() -> jax.Array:
        wrapper.run(q, (k, v), out=out)
        torch.cuda.synchronize()
        return jnp.from_dlpack(out)

    call.plan_us = plan_us  # pyright: ignore[reportFunctionMemberAccess]
    return [call]


PEERS: dict[str, Callable[[Case], list[Call]]] = {
    "xla_gather": xla_gather,
    "jax_triton": jax_triton,
    "jax_cudnn": jax_cudnn,
    "flash_attention_3": flash_attention_3,
    "flashinfer": flashinfer,
}


def start_builds(head_dims: set[int]) -> list[subprocess.Popen]:
    """Compile FlashInfer's kernels in the background: it does so on first use, for minutes."""
    return [subprocess.Popen([sys.executable, __file__, str(head_dim)]) for head_dim in head_dims]


def _build(head_dim: int) -> None:
    ones = jnp.ones((1, 2, 16, 1, head_dim), jnp.bfloat16)
    flashinfer(
        Case(
            q=jnp.ones((1, 1, head_dim), jnp.bfloat16),
            k_pool=ones,
            v_pool=ones,
            block_table=jnp.zeros((1, 1), jnp.int32),
            kv_lens=jnp.array([3], jnp.int32),
            cu_q_lens=jnp.array([0, 1], jnp.int32),
            lens=(3,),
        )
    )


if __name__ == "__main__":
    _build(int(sys.argv[1]))
