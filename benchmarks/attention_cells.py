"""The workloads of the attention benchmark: their lengths, their tensors, and what is right for them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv
from paged_kv_jax.kernels import attention_reference

CHECKED_TOKENS = 64  # query tokens of a cell that are compared with the reference


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload, causal, in bfloat16.

    Attributes:
      kv_lens: keys of each row, this step's tokens included.
      q_lens: query tokens of each row; one each if not given (decode).
      shared: tokens at the beginning of rows that are in the same blocks.
      sharers: how many rows, one after another, share them; all rows if not given.
      parts: names of the cells that together do this one's work.
      contenders: who is measured; everyone if empty.
    """

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    shared: int = 0
    sharers: int = 0
    parts: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "q_lens", self.q_lens or (1,) * len(self.kv_lens))
        object.__setattr__(self, "sharers", self.sharers or len(self.kv_lens))

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values that the rows see, each row's counted for itself."""
        return 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_dim * 2

    @property
    def flops(self) -> int:
        """Operations of both products for the pairs of a query and a key that it sees."""
        pairs = sum(
            q * n - q * (q - 1) // 2 for q, n in zip(self.q_lens, self.kv_lens, strict=True)
        )
        return 4 * self.head_dim * self.num_heads * pairs

    def record(self) -> dict:
        """The cell for a JSON file, with equal lengths in short."""
        short = {"kv_lens": _short(self.kv_lens), "q_lens": _short(self.q_lens)}
        return dataclasses.asdict(self) | short


DECODE = [
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

_EIGHT = (500, 1000, 1500, 2000, 2500, 3000, 3500, 4000)
_MIXED = ("mosaic_gpu", "flash_attention_3", "flashinfer")
PREFILL = [
    Cell("T4096", (4096,), (4096,)),
    Cell("T16384", (16384,), (16384,)),
    Cell("chunk512+32768", (33280,), (512,)),
    Cell("8x500-4000", _EIGHT, _EIGHT),
    Cell("T16384x64", (16384,), (16384,), head_dim=64),
    Cell("64decode", (4096,) * 64, contenders=_MIXED),
    Cell("chunk2048", (4096,), (2048,), contenders=_MIXED),
    Cell(
        "64decode+chunk2048", (4096,) * 65, (1,) * 64 + (2048,),
        parts=("64decode", "chunk2048"), contenders=_MIXED,
    ),
]  # fmt: skip

CASCADE = [
    Cell("B64x8192+512", (8704,) * 64, shared=8192),
    Cell("B256x2048+256", (2304,) * 256, shared=2048),
    Cell("16x16x2048+256", (2304,) * 256, shared=2048, sharers=16),  # samples of 16 prompts
    Cell("B16x1024+1024", (2048,) * 16, shared=1024),
]

CELLS = {"decode": DECODE, "prefill": PREFILL, "cascade": CASCADE}


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one cell."""

    cell: Cell
    q: jax.Array  # [T, H, D]
    k_pool: jax.Array  # [1, N, P, K, D]
    v_pool: jax.Array
    block_table: jax.Array  # int32 [B, M], -1 for "no block"

    @property
    def scale(self) -> float:
        """Of the logits."""
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def kv_lens(self) -> jax.Array:
        """int32 [B]."""
        return jnp.asarray(self.cell.kv_lens, jnp.int32)

    @property
    def table(self) -> jax.Array:
        """The block table with 0 for -1: peers may read the entries past a row's length."""
        return jnp.maximum(self.block_table, 0)

    @property
    def rows(self) -> np.ndarray:
        """[T], the row of each query token."""
        return np.repeat(np.arange(len(self.cell.q_lens)), self.cell.q_lens)

    @property
    def positions(self) -> np.ndarray:
        """[T], the position of each query token in its row."""
        starts = np.cumsum((0, *self.cell.q_lens[:-1]))
        first = np.array(self.cell.kv_lens) - np.array(self.cell.q_lens) - starts
        return np.arange(self.rows.size) + first[self.rows]

    def plan(self, *, shared_prefix: bool = False) -> pkv.Plan:
        """The step's plan; of the decode layout where each row brings one token."""
        longest = max(self.cell.q_lens)
        q_lens, sizes = 1, {}
        if longest > 1:
            q_lens = jnp.asarray(self.cell.q_lens, jnp.int32)
            sizes = dict(num_tokens=self.q.shape[0], max_query_len=longest)
        return pkv.plan_from_tables(
            self.block_table, self.kv_lens, q_lens, block_size=self.cell.block_size,
            shared_prefix=shared_prefix, **sizes,
        )  # fmt: skip


def make_case(cell: Cell) -> Case:
    """Random tensors, the same for the same cell."""
    shared = cell.shared // cell.block_size
    own = [-(-n // cell.block_size) - shared for n in cell.kv_lens]
    num_groups = -(-len(own) // cell.sharers)
    num_blocks = shared * num_groups + sum(own)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    prefixes = order[: shared * num_groups].reshape(num_groups, shared)
    table = np.full((len(own), shared + max(own)), -1, np.int32)
    first = prefixes.size
    for row, count in enumerate(own):
        table[row, :shared] = prefixes[row // cell.sharers]
        table[row, shared : shared + count] = order[first : first + count]
        first += count

    pool_shape = (1, num_blocks, cell.block_size, cell.num_kv_heads, cell.head_dim)
    q_shape = (sum(cell.q_lens), cell.num_heads, cell.head_dim)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    q, k_pool, v_pool = (
        normal(key, shape, jnp.bfloat16)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3), (q_shape, pool_shape, pool_shape), strict=True
        )
    )
    return Case(cell, q, k_pool, v_pool, jnp.asarray(table))


def checked_tokens(case: Case) -> np.ndarray:
    """The query tokens that are compared: all of them, or a random choice with each row's last."""
    num_tokens = case.rows.size
    if num_tokens <= CHECKED_TOKENS or len(case.cell.q_lens) == num_tokens:
        return np.arange(num_tokens)
    some = np.random.default_rng(1).choice(num_tokens, CHECKED_TOKENS, replace=False)
    return np.union1d(some, np.cumsum(case.cell.q_lens) - 1)


def reference(case: Case, tokens: np.ndarray) -> jax.Array:
    """Dense float32 attention of some query tokens, [tokens, H, D]."""

    rows, positions = (jnp.asarray(x[tokens], jnp.int32) for x in (case.rows, case.positions))
    tables = case.block_table[rows]
    return _reference(case.q[tokens], case.k_pool, case.v_pool, tables, positions)


@jax.jit
def _reference(q, k_pool, v_pool, tables, positions):
    def one_token(token):
        q, table, position = token
        out, _ = attention_reference.paged_attention(
            q[None].astype(jnp.float32), k_pool, v_pool, 0, table[None], position[None] + 1,
            jnp.array([0, 1], jnp.int32), max_query_len=1, scale=1 / math.sqrt(q.shape[-1]),
        )  # fmt: skip
        return out[0]

    return jax.lax.map(one_token, (q, tables, positions))  # one at a time: rows are large


def _short(lens: tuple[int, ...]) -> str:
    return f"{lens[0]} x {len(lens)}" if len(set(lens)) == 1 else ", ".join(map(str, lens))
