"""Copies of whole KV blocks on Hopper and newer GPUs: all layers, K and V, in place, in one launch.

A block of one layer is one contiguous row of P * K * D elements. One CTA, a single warpgroup, moves
one piece of it, a vector a thread of K and of V, through registers.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged_kv_jax.kernels import write_mosaic_gpu
from paged_kv_jax.kernels.write_mosaic_gpu import (
    piece_at,
    piece_size,
    set_piece_at,
    vector_width,
)

copy_blocks_unsupported_reason = write_mosaic_gpu.write_unsupported_reason


def _copy_kernel(src_blocks, dst_blocks, k_pool, v_pool, *, num_layers: int, width: int):
    num_blocks, row_size = k_pool.shape[0] // num_layers, k_pool.shape[1]
    size = piece_size(width)
    parts = row_size // size
    cta = jax.lax.axis_index("cta")
    part, layer, pair = cta % parts, cta // parts % num_layers, cta // (parts * num_layers)
    src, dst = src_blocks[pair], dst_blocks[pair]

    def move(start):
        k, v = (piece_at(pool, layer * num_blocks + src, start, width) for pool in (k_pool, v_pool))
        set_piece_at(k_pool, layer * num_blocks + dst, start, width, k)
        set_piece_at(v_pool, layer * num_blocks + dst, start, width, v)

    @pl.when((src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks))
    def _copy():
        move(part * size)

        if row_size % size:  # a piece that ends with the row overlaps the one before it

            @pl.when(part == parts - 1)
            def _rest():
                move(row_size - size)


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src_blocks: jax.Array, dst_blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copy whole blocks, in all layers.

    Args:
      k_pool, v_pool: [L, N, P, K, D].
      src_blocks, dst_blocks: int32 [C]; pairs with an id outside [0, N) are dropped. Destinations
        are distinct, and none of them is also a source: pairs are copied in no order.

    Returns:
      The pools, updated in place where they are donated or carried by a loop.
    """
    num_layers = k_pool.shape[0]
    row_size = math.prod(k_pool.shape[2:])
    width = vector_width(row_size, k_pool.dtype)
    num_ctas = src_blocks.size * num_layers * (row_size // piece_size(width))
    refs = [jax.new_ref(pool.reshape(-1, row_size)) for pool in (k_pool, v_pool)]
    launch: Any = pl.kernel(
        functools.partial(_copy_kernel, num_layers=num_layers, width=width),
        (),
        mesh=plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",)),
        # No memory is both read and written here, so nothing needs the automatic barriers.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        name="paged_kv_copy",
    )
    launch(src_blocks, dst_blocks, *refs)
    k_pool, v_pool = (jax.freeze(ref).reshape(k_pool.shape) for ref in refs)
    return k_pool, v_pool
