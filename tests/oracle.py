"""What the tests compare against: plain Python and numpy, float64, written without looking for speed.

* `make_case` makes a random ragged batch over paged pools; `Case.plan()` is its step plan.
* `attention(case, **options)` is the meaning of paged attention, in float64.
* `dense_rounded(case, **options)` is an ordinary dense computation with a float32 softmax, rounded to
  the output type; `assert_rounds_well` holds an implementation to a small multiple of its error.
* `run(case, implementation, **options)` is the code under test, compiled.
* `AllocatorModel` is the allocator as lists and dicts.

But for `run`, nothing here calls the code under test (`Case.plan` fills the `Plan` dataclass by hand).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import paged_kv_jax as pkv


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A ragged batch over paged pools: numpy arrays, with the letters of the package.

    q [T, H, D]; k_pool, v_pool [L, N, P, K, D]; layer int; block_table int32 [B, M]; kv_lens int32 [B];
    cu_q_lens int32 [B + 1]. T may exceed cu_q_lens[B]: the rest are places without a token.
    """

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    layer: int
    block_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray

    @property
    def block_size(self) -> int:
        return self.k_pool.shape[2]

    @property
    def q_lens(self) -> np.ndarray:
        return np.diff(self.cu_q_lens)

    @property
    def max_query_len(self) -> int:
        return max(1, int(self.q_lens.max()))

    @property
    def raw(self) -> tuple:
        """The positional arguments of a raw attention kernel, on the device."""
        return tuple(jnp.asarray(getattr(self, field.name)) for field in dataclasses.fields(self))

    @property
    def pool(self) -> pkv.KVPool:
        return pkv.KVPool(k=jnp.asarray(self.k_pool), v=jnp.asarray(self.v_pool))

    def plan(self) -> pkv.Plan:
        """The step's plan; rows with more query tokens than keys are let in, as kernels allow them."""
        num_tokens = self.q.shape[0]
        slots, positions, rows = (np.full(num_tokens, fill, np.int32) for fill in (-1, 0, -1))
        for row, token, position in _tokens(self):
            if self.kv_lens[row] == 0:
                continue
            positions[token], rows[token] = position, row
            if position >= 0:
                block = self.block_table[row, position // self.block_size]
                slots[token] = -1 if block < 0 else slot(self, row, position)
        return pkv.Plan(
            block_table=jnp.asarray(self.block_table),
            kv_lens=jnp.asarray(self.kv_lens),
            cu_q_lens=jnp.asarray(self.cu_q_lens),
            slot_mapping=jnp.asarray(slots),
            positions=jnp.asarray(positions),
            token_rows=jnp.asarray(rows),
            errors=jnp.int32(0),
            block_size=self.block_size,
            max_query_len=self.max_query_len,
        )

    def seen_slots(self, sliding_window: int | None = None) -> np.ndarray:
        """bool [N, P]: slots of `layer` that some query token sees."""
        seen = np.zeros(self.k_pool.shape[1:3], bool)
        for row, _, position in _tokens(self):
            for key in visible_positions(self, row, position, sliding_window):
                block, offset = divmod(slot(self, row, key), self.block_size)
                seen[block, offset] = True
        return seen

    def with_unseen(self, value: float, sliding_window: int | None = None) -> "Case":
        """The same case with `value` in every slot that no query sees, other layers included."""
        seen = np.zeros(self.k_pool.shape[:3], bool)
        seen[self.layer] = self.seen_slots(sliding_window)

        def poisoned(pool: np.ndarray) -> np.ndarray:
            pool = pool.copy()
            pool[~seen] = value
            return pool

        return dataclasses.replace(self, k_pool=poisoned(self.k_pool), v_pool=poisoned(self.v_pool))


def make_case(
    rng: np.random.Generator,
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    q_dtype: str | None = None,
    num_layers: int = 2,
    layer: int = 1,
    max_blocks: int | None = None,
    num_tokens: int | None = None,
    spare_blocks: int = 3,
    magnitude: float = 1.0,
    poison: float | None = None,
) -> Case:
    """A random batch whose rows own randomly scattered blocks of a pool that is full of other values.

    Args:
      q_lens, kv_lens: query tokens and keys of each row, this step's tokens included in the keys.
      dtype: of the pools, and of q if `q_dtype` is not given.
      max_blocks: M; one more than the longest row needs if not given, so that -1 entries exist.
      num_tokens: T; sum(q_lens) if not given.
      spare_blocks: blocks of the pool that belong to no row.
      magnitude: standard deviation of q; K and V have 1.
      poison: value of every slot that no query sees (NaN, Inf, ...); random values if None.
    """
    blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = sum(blocks) + spare_blocks
    max_blocks = max(blocks) + 1 if max_blocks is None else max_blocks
    order = rng.permutation(num_blocks)
    block_table = np.full((len(kv_lens), max_blocks), -1, np.int32)
    for row, count in enumerate(blocks):
        block_table[row, :count], order = order[:count], order[count:]

    def normal(*shape: int, dtype: str) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    pool_shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    num_tokens = sum(q_lens) if num_tokens is None else num_tokens
    case = Case(
        q=(normal(num_tokens, num_heads, head_dim, dtype="float32") * np.float32(magnitude)).astype(
            jnp.dtype(q_dtype or dtype)
        ),
        k_pool=normal(*pool_shape, dtype=dtype),
        v_pool=normal(*pool_shape, dtype=dtype),
        layer=layer,
        block_table=block_table,
        kv_lens=np.asarray(kv_lens, np.int32),
        cu_q_lens=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
    )
    return case if poison is None else case.with_unseen(poison)


def random_options(rng: np.random.Generator, num_heads: int, *names: str) -> dict:
    """Values for the named options of `paged_attention`, all of which change the result."""
    values = dict(
        scale=0.3,
        logits_soft_cap=2.5,
        sliding_window=7,
        sinks=rng.standard_normal(num_heads).astype(np.float32),
        alibi_slopes=(0.5 * rng.random(num_heads)).astype(np.float32),
    )
    return {name: values[name] for name in names}


def run(case: Case, implementation: str | None, **options) -> tuple[np.ndarray, np.ndarray]:
    """`pkv.paged_attention` on the case, compiled: out [T, H, D] in q's dtype, LSE float32 [T, H]."""
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: value for name, value in options.items() if name not in arrays}
    attend = _compiled(implementation, **static)
    out, lse = attend(jnp.asarray(case.q), case.pool, jnp.int32(case.layer), case.plan(), arrays)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


@functools.cache
def _compiled(implementation: str | None, **options):
    @jax.jit
    def attend(q, pool, layer, plan, arrays):
        return pkv.paged_attention(
            q,
            pool,
            layer,
            plan,
            **options,
            **arrays,
            return_lse=True,
            implementation=implementation,
        )

    return attend


def slot(case: Case, row: int, position: int) -> int:
    """The slot that holds one token of one row."""
    block = case.block_table[row, position // case.block_size]
    assert block >= 0, f"row {row} has no block for position {position}"
    return int(block) * case.block_size + position % case.block_size


def visible_positions(
    case: Case,
    row: int,
    position: int,
    sliding_window: int | None = None,
    causal: bool = True,
) -> range:
    """Positions of the keys that a query at `position` of `row` sees."""
    if not causal:
        return range(int(case.kv_lens[row]))
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    return range(first, max(first, min(position + 1, int(case.kv_lens[row]))))


def attention(
    case: Case,
    *,
    scale: float | None = None,
    causal: bool = True,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Paged attention in float64: out [T, H, D] and the natural log-sum-exp [T, H]."""
    return _attention(
        case, np.float64, scale, logits_soft_cap, sliding_window, sinks, alibi_slopes, causal
    )


def dense_rounded(
    case: Case,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """The same computed in float32 throughout, then rounded to q's dtype: out [T, H, D]."""
    out, _ = _attention(
        case, np.float32, scale, logits_soft_cap, sliding_window, sinks, alibi_slopes
    )
    return out.astype(case.q.dtype)


def assert_rounds_well(out, case: Case, **options) -> None:
    """Hold `out` to 2 x the largest and 1.5 x the mean error of `dense_rounded`, against float64."""
    exact, _ = attention(case, **options)
    out = np.asarray(out)
    assert out.dtype == case.q.dtype, f"{out.dtype=} but q has {case.q.dtype}"
    error = np.abs(out.astype(np.float64) - exact)
    allowed = np.abs(dense_rounded(case, **options).astype(np.float64) - exact)
    assert np.all(np.isfinite(error)), "the output is not finite"
    assert error.max() <= 2 * allowed.max(), f"largest error {error.max()} > 2 x {allowed.max()}"
    assert error.mean() <= 1.5 * allowed.mean(), (
        f"mean error {error.mean()} > 1.5 x {allowed.mean()}"
    )


def _tokens(case: Case):
    """(row, token, position) of every query token; the position is negative where keys are fewer."""
    for row, kv_len in enumerate(case.kv_lens):
        begin, end = int(case.cu_q_lens[row]), int(case.cu_q_lens[row + 1])
        for i in range(end - begin):
            yield row, begin + i, int(kv_len) - (end - begin) + i


def _attention(
    case, wide, scale, logits_soft_cap, sliding_window, sinks, alibi_slopes, causal=True
):
    num_tokens, num_heads, head_dim = case.q.shape
    group = num_heads // case.k_pool.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros((num_tokens, num_heads, head_dim), wide)
    lse = np.full((num_tokens, num_heads), -np.inf, wide)
    keys, values = (
        pool[case.layer].reshape(-1, *pool.shape[3:]) for pool in (case.k_pool, case.v_pool)
    )  # [slots, K, D]
    for row, token, position in _tokens(case):
        positions = visible_positions(case, row, position, sliding_window, causal)
        slots = np.array([slot(case, row, key) for key in positions], np.int64)
        for head in range(num_heads):
            query = case.q[token, head].astype(wide)
            logits = keys[slots, head // group].astype(wide) @ query * wide(scale)
            if logits_soft_cap is not None:
                logits = wide(logits_soft_cap) * np.tanh(logits / wide(logits_soft_cap))
            if alibi_slopes is not None:
                logits += wide(alibi_slopes[head]) * (np.array(positions, wide) - wide(position))
            extra = [] if sinks is None else [wide(sinks[head])]
            if not len(logits) and not extra:
                continue
            top = max([*logits, *extra])
            weights = np.exp(logits - top)
            total = weights.sum(dtype=wide) + sum(np.exp(sink - top) for sink in extra)
            out[token, head] = weights @ values[slots, head // group].astype(wide) / total
            lse[token, head] = top + np.log(total)
    return out, lse


class AllocatorModel:
    """The allocator's meaning as lists and dicts.

    Which free block a row is handed is the allocator's choice, so `check` takes it from the state and
    tests only that it was free; everything else is exact.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_seqs: int, max_blocks_per_seq: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_seqs, self.max_blocks_per_seq = max_seqs, max_blocks_per_seq
        self.lens: dict[int, int] = {}  # live sequences
        self.tables: dict[int, list[int | None]] = {}  # None: handed out, not yet known which
        self.free_blocks = set(range(num_blocks))
        self.num_free = num_blocks
        self.failures: set[int] = set()

    def allocate(self, seq_ids, counts, bound: int | None = None) -> list[int]:
        return self._grow(seq_ids, counts, bound, must_be_live=False)

    def append(self, seq_ids, counts, bound: int | None = None) -> list[int]:
        return self._grow(seq_ids, counts, bound, must_be_live=True)

    def free(self, seq_ids) -> list[int]:
        results = []
        for row, seq_id in enumerate(seq_ids):
            code = self._seq_failure(seq_ids, row, self.lens)
            results.append(len(self.tables[seq_id]) if code is None else code)
        for seq_id, result in zip(seq_ids, results, strict=True):
            if seq_id != -1 and result >= 0:
                blocks = self.tables.pop(seq_id)
                del self.lens[seq_id]
                self.free_blocks |= set(blocks)
                self.num_free += len(blocks)
        return self._report(results)

    def check(self, state: pkv.BlockState) -> None:
        """Assert that the state is the model's, and learn which blocks were handed out."""
        table, lens, counts = (
            np.asarray(array)
            for array in (state.block_table, state.seq_lens, state.seq_block_count)
        )
        for seq_id in range(self.max_seqs):
            assert lens[seq_id] == self.lens.get(seq_id, 0), f"length of {seq_id}"
            known = self.tables.get(seq_id, [])
            assert counts[seq_id] == len(known), f"block count of {seq_id}"
            for column in range(self.max_blocks_per_seq):
                block = int(table[seq_id, column])
                if column >= len(known):
                    assert block == -1, f"block {block} past the end of {seq_id}"
                elif known[column] is not None:
                    assert block == known[column], f"block {column} of {seq_id} changed"
                else:
                    assert block in self.free_blocks, f"{seq_id} was given {block}, which was taken"
                    self.free_blocks.remove(block)
                    known[column] = block
        assert int(state.free_top) == self.num_free == len(self.free_blocks)
        assert set(np.asarray(state.free_list)[: self.num_free].tolist()) == self.free_blocks
        word = sum(1 << (-code - 1) for code in self.failures)
        assert int(state.errors) == word, "the sticky word differs"

    def _grow(self, seq_ids, counts, bound, must_be_live) -> list[int]:
        results = []
        exhausted = False
        for row, (seq_id, count) in enumerate(zip(seq_ids, counts, strict=True)):
            code = self._seq_failure(seq_ids, row, self.lens if must_be_live else None)
            if code is not None:
                results.append(code)
                continue
            new_len = self.lens.get(seq_id, 0) + count
            needed = math.ceil(new_len / self.block_size) - len(self.tables.get(seq_id, []))
            if count < 0 or (bound is not None and count > bound):
                results.append(-5)
            elif new_len > self.max_blocks_per_seq * self.block_size:
                results.append(-3)
            elif needed > 0 and (exhausted or needed > self.num_free):
                exhausted = True
                results.append(-1)
            else:
                if new_len:
                    self.lens[seq_id] = new_len
                    self.tables.setdefault(seq_id, []).extend([None] * needed)
                self.num_free -= needed
                results.append(needed)
        return self._report(results)

    def _seq_failure(self, seq_ids, row: int, live) -> int | None:
        """The code with which a row fails for its seq_id; 0 for padding; None if it may be served."""
        seq_id = seq_ids[row]
        if seq_id == -1:
            return 0
        if not 0 <= seq_id < self.max_seqs:
            return -2
        if seq_id in seq_ids[:row]:
            return -4
        if live is not None and seq_id not in live:
            return -2
        return None

    def _report(self, results: list[int]) -> list[int]:
        self.failures |= {result for result in results if result < 0}
        return results
