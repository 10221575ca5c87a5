"""KV writes on Hopper and newer GPUs: K and V of T tokens go to their slots, in place, in one launch.

A token's K, all heads of it, is one contiguous row of K * D elements in the input and in the pool,
and so is its V. One CTA, a single warpgroup, moves the two rows of one token through registers:
the loads don't wait for the slot, so that a small batch costs one trip to memory and one back.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a warpgroup
VECTOR_BYTES = 16  # the widest access of one thread


def write_unsupported_reason(
    k_pool: jax.Array | jax.ShapeDtypeStruct, *, compute_capability: float | None = None
) -> str | None:
    """Why `write` here cannot serve a pool, or None if it can: any shape and dtype, on Hopper."""
    del k_pool
    if compute_capability is None or compute_capability < 9.0:
        return (
            f"{compute_capability=}; mosaic_gpu needs an NVIDIA GPU of compute capability 9.0 "
            "or newer"
        )
    return None


def vector_width(row_size: int, dtype: jnp.dtype) -> int:
    """Elements that each thread of a warpgroup moves at once in rows of `row_size`; 0: too short.

    Rows start at multiples of their size, so aligned vectors must divide it.
    """
    width = math.gcd(row_size, VECTOR_BYTES // dtype.itemsize)
    while width * THREADS > row_size:
        width //= 2
    return width


def piece_size(width: int) -> int:
    """Elements of a piece of a row: `width` for each thread, or just one where `width` is 0."""
    return max(1, width * THREADS)


def piece_at(ref, row, start, width: int) -> jax.Array:
    """Load one piece of one row of `ref` [rows, row_size] into registers."""
    if width == 0:
        return ref[row, start]
    layout = plgpu.Layout.WG_STRIDED((piece_size(width),), vec_size=width)
    return plgpu.layout_cast(ref[row, pl.ds(start, piece_size(width))], layout)


def set_piece_at(ref, row, start, width: int, piece: jax.Array) -> None:
    """Store what `piece_at` loaded."""
    index = start if width == 0 else pl.ds(start, piece_size(width))
    ref[row, index] = piece


def _write_kernel(slots, layer, k, v, k_pool, v_pool, *, num_slots: int, width: int):
    token = jax.lax.axis_index("token")
    row_size, size = k.shape[1], piece_size(width)
    # The last piece ends with the row: it may overlap another, and writes the same there.
    starts = [min(start, row_size - size) for start in range(0, row_size, size)]
    slot = slots[token]
    moves = [
        (pool, start, piece_at(new, token, start, width))
        for start in starts
        for new, pool in ((k, k_pool), (v, v_pool))
    ]

    @pl.when((slot >= 0) & (slot < num_slots))
    def _store():
        for pool, start, piece in moves:
            set_piece_at(pool, layer[0] * num_slots + slot, start, width, piece)


def write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Put each token's K and V into its slot of one layer.

    Args:
      k_pool, v_pool: [L, N, P, K, D].
      layer: int32 [], may be traced.
      k, v: [T, K, D]; cast to the pools' dtype.
      slots: int32 [T], `block * P + offset`, distinct; slots outside [0, N * P) are dropped.

    Returns:
      The pools, updated in place where they are donated or carried by a loop.
    """
    num_layers, num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    num_tokens, row_size = k.shape[0], num_kv_heads * head_dim
    num_slots = num_blocks * block_size
    # Mutable references to the pools: the launch aliases them, so nothing of their size is copied.
    refs = [
        jax.new_ref(pool.reshape(num_layers * num_slots, row_size)) for pool in (k_pool, v_pool)
    ]
    launch: Any = pl.kernel(
        functools.partial(
            _write_kernel, num_slots=num_slots, width=vector_width(row_size, k_pool.dtype)
        ),
        (),
        mesh=plgpu.Mesh(grid=(num_tokens,), grid_names=("token",)),
        # No memory is both read and written here, so nothing needs the automatic barriers.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        name="paged_kv_write",
    )
    launch(
        slots,
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(new.astype(k_pool.dtype).reshape(num_tokens, row_size) for new in (k, v)),
        *refs,
    )
    k_pool, v_pool = (jax.freeze(ref).reshape(k_pool.shape) for ref in refs)
    return k_pool, v_pool
