"""The static geometry of a paged KV cache."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

POOL_DTYPES = ("bfloat16", "float16", "float32")
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Geometry of the block pools and of the block tables; hashable, so it may be a static argument.

    Attributes:
      num_layers: L, layers of the model; each has its own K and V blocks.
      num_kv_heads: K, key/value heads per layer.
      head_dim: D, elements per head.
      num_blocks: N, physical blocks per layer, shared by all sequences.
      block_size: P, token slots per block; a power of two.
      max_seqs: S, sequences that can be live at once (rows of the block table).
      max_blocks_per_seq: M, blocks one sequence may own (columns of the block table).
      dtype: element type of the pools: bfloat16, float16 or float32.

    Raises:
      ValueError: a field has a value that cannot work; the message names it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    max_seqs: int
    max_blocks_per_seq: int
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "dtype":
                continue
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be an int of at least 1")
            object.__setattr__(self, field.name, int(value))
        if self.block_size & (self.block_size - 1):
            below = 1 << (self.block_size.bit_length() - 1)
            raise ValueError(
                f"block_size={self.block_size} must be a power of two, such as {below} or {2 * below}"
            )
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError as error:
            raise ValueError(f"dtype={self.dtype!r} must be one of {POOL_DTYPES}") from error
        if dtype.name not in POOL_DTYPES:
            raise ValueError(f"dtype={dtype.name!r} must be one of {POOL_DTYPES}")
        object.__setattr__(self, "dtype", dtype)
        # Slots and per-sequence positions are int32 on the device.
        if self.num_blocks * self.block_size > _INT32_MAX:
            raise ValueError(
                f"num_blocks={self.num_blocks} with block_size={self.block_size} makes "
                f"{self.num_blocks * self.block_size} slots; at most {_INT32_MAX} can be addressed"
            )
        if self.max_blocks_per_seq * max(self.block_size, self.max_seqs) > _INT32_MAX:
            raise ValueError(
                f"max_blocks_per_seq={self.max_blocks_per_seq} is too large for "
                f"block_size={self.block_size} and max_seqs={self.max_seqs}: its product with "
                f"either must stay below 2^31"
            )

    @classmethod
    def for_memory(cls, memory_bytes: int, **fields: Any) -> Self:
        """The config whose pools are as large as fit into `memory_bytes` (K and V, all layers).

        Args:
          memory_bytes: budget in bytes.
          **fields: every field of the config but `num_blocks`.

        Raises:
          ValueError: not even one block fits.
        """
        if "num_blocks" in fields:
            raise ValueError("num_blocks follows from memory_bytes; leave it out of for_memory")
        one = cls(num_blocks=1, **fields)
        num_blocks = int(memory_bytes) // one.memory_bytes
        if num_blocks < 1:
            raise ValueError(
                f"memory_bytes={memory_bytes} is too small: one block takes {one.memory_bytes} bytes"
            )
        return dataclasses.replace(one, num_blocks=num_blocks)

    @property
    def token_stride(self) -> int:
        """Elements from one token slot to the next within a layer's pool: K * D."""
        return self.num_kv_heads * self.head_dim

    @property
    def block_stride(self) -> int:
        """Elements from one block to the next within a layer's pool: P * K * D."""
        return self.block_size * self.token_stride

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in the pools: K and V, all layers."""
        return 2 * self.num_layers * self.token_stride * jnp.dtype(self.dtype).itemsize

    @property
    def memory_bytes(self) -> int:
        """Bytes of all pools: K and V, all layers."""
        return self.token_capacity * self.bytes_per_token

    @property
    def token_capacity(self) -> int:
        """Token slots of the pool: N * P."""
        return self.num_blocks * self.block_size

    @property
    def max_seq_len(self) -> int:
        """Tokens one sequence may hold: M * P."""
        return self.max_blocks_per_seq * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens takes."""
        return -(-num_tokens // self.block_size)
