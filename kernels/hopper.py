"""What the attention kernels for NVIDIA Hopper have in common: what they serve, how K and V are tiled."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 256
DTYPES = (jnp.bfloat16, jnp.float16)


def hopper_unsupported_reason(
    name: str,
    q: jax.Array | jax.ShapeDtypeStruct,
    k_pool: jax.Array | jax.ShapeDtypeStruct,
    compute_capability: float | None,
) -> str | None:
    """Why neither kernel can serve a call on such a GPU, with such arrays; None if both can.

    Args:
      name: of the kernel, for the message.
      q: [T, H, D]. k_pool: [L, N, P, K, D]. Arrays, or their shapes and dtypes.
      compute_capability: of the GPU, such as 9.0; None where there is none.
    """
    head_dim, block_size = q.shape[-1], k_pool.shape[2]
    if compute_capability is None:
        return f"no NVIDIA GPU; {name} needs compute capability 9.x (Hopper)"
    if int(compute_capability) != 9:
        return f"{compute_capability=}; {name} uses the wgmma of 9.x (Hopper)"
    if q.dtype not in DTYPES or q.dtype != k_pool.dtype:
        return (
            f"q is {q.dtype} and the pool {k_pool.dtype}; "
            f"{name} needs both bfloat16 or both float16"
        )
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"{head_dim=}; {name} serves multiples of 16 up to {MAX_HEAD_DIM}"
    if block_size & (block_size - 1) or block_size > MAX_BLOCK_SIZE:
        return f"{block_size=}; {name} serves powers of two up to {MAX_BLOCK_SIZE}"
    return None


class PoolTiles:
    """How tiles of K and V lie in shared memory and arrive there; the base of both `Problem`s."""

    head_dim: int
    block_size: int
    itemsize: int
    tile_tokens: int  # KV tokens per step
    copy_tokens: int  # tokens per TMA copy

    @property
    def swizzle(self) -> int:
        """Bytes."""
        return plgpu.find_swizzle(self.head_dim * self.itemsize * 8)

    @property
    def swizzle_elems(self) -> int:
        """Elements of a head in one tile of shared memory."""
        return self.swizzle // self.itemsize

    @property
    def copies(self) -> int:
        """Copies per tile, of K and of V."""
        return self.tile_tokens // self.copy_tokens

    @property
    def copy_parts(self) -> int:
        """TMA copies for one: a block of less than 8 tokens goes into parts of swizzled tiles."""
        return self.head_dim // self.swizzle_elems if self.block_size < 8 else 1
