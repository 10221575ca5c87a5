"""`PagedKVCache`: the allocator's state and the pools as one immutable object."""

import dataclasses
import functools
import html
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from paged_kv_jax import allocator, attention, compact, eviction, pool, prefix, sharing
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import ResultCode
from paged_kv_jax.plan import Plan
from paged_kv_jax.prefix_table import PrefixIndex, init_prefix_index
from paged_kv_jax.state import BlockState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("state", "pool", "index"),
    meta_fields=("config",),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache:
    """A paged KV cache: a pytree whose methods return new caches and never change or donate `self`.

    The methods are the functions of the same names in this package, with the state and the pool
    filled in.

    Attributes:
      config: geometry (static).
      state: who owns which block.
      pool: the keys and values.
      index: which blocks hold which prompts' beginnings; None without prefix reuse. With it, every
        method that takes blocks evicts what nobody uses where too few are free.
    """

    config: KVCacheConfig
    state: BlockState
    pool: pool.KVPool
    index: PrefixIndex | None = None

    @classmethod
    def create(cls, config: KVCacheConfig, *, prefix_reuse: bool = False) -> Self:
        """An empty cache, with an index over prompts' beginnings if `prefix_reuse`."""
        return cls(
            config=config,
            state=allocator.init(config),
            pool=pool.init_pool(config),
            index=init_prefix_index(config) if prefix_reuse else None,
        )

    @property
    def errors(self) -> jax.Array:
        """int32 [], the state's sticky word."""
        return self.state.errors

    def allocate(
        self, seq_ids: jax.Array, num_tokens: jax.Array | int, *, max_new_tokens: int | None = None
    ) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.allocate` on this cache's state."""
        cache = self._with_room(_blocks_to_take, seq_ids, num_tokens)
        state, result = allocator.allocate(
            cache.state, seq_ids, num_tokens, max_new_tokens=max_new_tokens
        )
        return dataclasses.replace(cache, state=state), result

    def append(
        self,
        seq_ids: jax.Array,
        num_new_tokens: jax.Array | int,
        *,
        max_new_tokens: int | None = None,
    ) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.append` on this cache's state."""
        cache = self._with_room(_blocks_to_take, seq_ids, num_new_tokens)
        state, result = allocator.append(
            cache.state, seq_ids, num_new_tokens, max_new_tokens=max_new_tokens
        )
        return dataclasses.replace(cache, state=state), result

    def free(self, seq_ids: jax.Array) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.free` on this cache's state."""
        state, result = allocator.free(self.state, seq_ids)
        return dataclasses.replace(self, state=state), result

    def fork(
        self, parent_ids: jax.Array, child_ids: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.fork` on this cache's state, with its copies performed."""
        cache = self._with_room(_one_block, parent_ids)
        state, result, copies = sharing.fork(cache.state, parent_ids, child_ids, lengths)
        return dataclasses.replace(cache, state=state).copy_blocks(*copies), result

    def truncate(self, seq_ids: jax.Array, new_lens: jax.Array) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.truncate` on this cache's state, with its copies performed."""
        cache = self._with_room(_one_block, seq_ids)
        state, result, copies = sharing.truncate(cache.state, seq_ids, new_lens)
        return dataclasses.replace(cache, state=state).copy_blocks(*copies), result

    def release_before(self, seq_ids: jax.Array, positions: jax.Array) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.release_before` on this cache's state."""
        state, result = sharing.release_before(self.state, seq_ids, positions)
        return dataclasses.replace(self, state=state), result

    def admit(
        self,
        seq_ids: jax.Array,
        tokens: jax.Array,
        lens: jax.Array,
        salt: jax.Array | None = None,
    ) -> tuple[Self, jax.Array, jax.Array]:
        """`paged_kv_jax.admit` on this cache: start sequences on top of what the index finds.

        Returns:
          The new cache; int32 [B], the result; int32 [B], tokens found, which need no prefill.
        """
        index, state, result, found = prefix.admit(
            self._required_index("admit"), self.state, seq_ids, tokens, lens, salt
        )
        return dataclasses.replace(self, index=index, state=state), result, found

    def commit(
        self,
        seq_ids: jax.Array,
        tokens: jax.Array,
        lens: jax.Array,
        salt: jax.Array | None = None,
    ) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.commit` on this cache: let what is written now be found."""
        index, state, result = prefix.commit(
            self._required_index("commit"), self.state, seq_ids, tokens, lens, salt
        )
        return dataclasses.replace(self, index=index, state=state), result

    def forget(self) -> Self:
        """`paged_kv_jax.forget` on this cache: nothing written under the old weights is found."""
        index, state, _ = eviction.forget(self._required_index("forget"), self.state)
        return dataclasses.replace(self, index=index, state=state)

    def compact(self) -> Self:
        """`paged_kv_jax.compact` on this cache."""
        state, new_pool, index = compact.compact(self.state, self.pool, self.index)
        return dataclasses.replace(self, state=state, pool=new_pool, index=index)

    def resize(self, num_blocks: int) -> Self:
        """`paged_kv_jax.resize` on this cache; its config says the new size. For the host."""
        state, new_pool, index = compact.resize(self.state, self.pool, num_blocks, self.index)
        config = dataclasses.replace(self.config, num_blocks=num_blocks)
        return dataclasses.replace(self, config=config, state=state, pool=new_pool, index=index)

    def plan(
        self,
        seq_ids: jax.Array,
        num_new_tokens: jax.Array | int,
        result: jax.Array,
        *,
        num_tokens: int | None = None,
        max_query_len: int | None = None,
        shared_prefix: bool = False,
    ) -> tuple[Self, Plan]:
        """`paged_kv_jax.make_plan` on this cache's state; what did not fit joins the sticky word."""
        plan = allocator.make_plan(
            self.state, seq_ids, num_new_tokens, result,
            num_tokens=num_tokens, max_query_len=max_query_len, shared_prefix=shared_prefix,
        )  # fmt: skip
        state = dataclasses.replace(self.state, errors=self.state.errors | plan.errors)
        return dataclasses.replace(self, state=state), plan

    def step(
        self,
        seq_ids: jax.Array,
        num_new_tokens: jax.Array | int = 1,
        *,
        num_tokens: int | None = None,
        max_query_len: int | None = None,
        shared_prefix: bool = False,
    ) -> tuple[Self, Plan, jax.Array]:
        """`paged_kv_jax.step` on this cache's state: `append`, then `plan`.

        Args:
          seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
          num_new_tokens: an int for every row alike, or int32 [B] with `num_tokens` = T.
          num_tokens, max_query_len, shared_prefix: as for `make_plan`.

        Returns:
          The new cache, the plan, and int32 [B], the result of `append`.
        """
        cache = self._with_room(_blocks_to_take, seq_ids, num_new_tokens)
        state, plan, result = allocator.step(
            cache.state, seq_ids, num_new_tokens,
            num_tokens=num_tokens, max_query_len=max_query_len, shared_prefix=shared_prefix,
        )  # fmt: skip
        return dataclasses.replace(cache, state=state), plan, result

    def write(self, layer: jax.Array | int, k: jax.Array, v: jax.Array, plan: Plan) -> Self:
        """`paged_kv_jax.write` into this cache's pool."""
        return dataclasses.replace(self, pool=pool.write(self.pool, layer, k, v, plan))

    def attend(self, q: jax.Array, layer: jax.Array | int, plan: Plan, **options: Any) -> Any:
        """`paged_kv_jax.paged_attention` over this cache's pool."""
        return attention.paged_attention(q, self.pool, layer, plan, **options)

    def copy_blocks(self, src_blocks: jax.Array, dst_blocks: jax.Array) -> Self:
        """`paged_kv_jax.copy_blocks` within this cache's pool."""
        return dataclasses.replace(self, pool=pool.copy_blocks(self.pool, src_blocks, dst_blocks))

    def _required_index(self, method: str) -> PrefixIndex:
        if self.index is None:
            raise ValueError(f"{method} needs a prefix index: create(config, prefix_reuse=True)")
        return self.index

    def _with_room(self, needed: Callable[..., jax.Array], *args: Any) -> Self:
        """This cache, with what `needed(state, *args)` says free, where there is an index to evict."""
        if self.index is None:
            return self
        index, state = eviction.make_room(self.index, self.state, needed(self.state, *args))
        return dataclasses.replace(self, index=index, state=state)

    def __repr__(self) -> str:
        head = f"PagedKVCache({_geometry(self.config)})"
        if not _is_readable(self.state):
            return head
        return "\n  ".join([head, _fullness(self), *_owners(self.state), *_failures(self.state)])

    def _repr_html_(self) -> str:
        geometry = html.escape(_geometry(self.config))
        if not _is_readable(self.state):
            return f"<b>PagedKVCache</b> {geometry}"
        full = 100 * (1 - int(self.state.free_top) / self.config.num_blocks)
        bar = (
            '<div style="background:#8884;width:24em;height:0.8em">'
            f'<div style="background:#4878d0;width:{full:.1f}%;height:100%"></div></div>'
        )
        lines = [_fullness(self), *_owners(self.state), *_failures(self.state)]
        listing = "<br>".join(html.escape(line) for line in lines)
        return f"<b>PagedKVCache</b> {geometry}{bar}{listing}"


def _blocks_to_take(
    state: BlockState, seq_ids: jax.Array, num_tokens: jax.Array | int
) -> jax.Array:
    """int32 [B]: blocks that rows take for `num_tokens` more tokens; 0 for one that must fail."""
    in_range = (seq_ids >= 0) & (seq_ids < state.max_seqs)
    safe_ids = jnp.where(in_range, seq_ids, 0)
    seq_len, owned = state.seq_lens[safe_ids], state.seq_block_count[safe_ids]
    room = state.max_blocks_per_seq * state.block_size - seq_len
    is_served = in_range & (jnp.asarray(num_tokens) >= 0) & (num_tokens <= room)
    added = jnp.where(is_served, num_tokens, 0).astype(jnp.int32)
    return jnp.where(is_served, -(-(seq_len + added) // state.block_size) - owned, 0)


def _one_block(state: BlockState, seq_ids: jax.Array) -> jax.Array:
    """int32 [B]: the most that a fork or a truncation takes: a tail's copy."""
    return (jnp.asarray(seq_ids) != -1).astype(jnp.int32)


_MOST_OWNERS_SHOWN = 8


def _is_readable(state: BlockState) -> bool:
    """Whether the state holds one cache's values: not traced, not batched, not deleted."""
    leaf = state.free_top
    is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_concrete and leaf.ndim == 0 and not leaf.is_deleted()


def _geometry(config: KVCacheConfig) -> str:
    return (
        f"{config.num_layers} layers, {config.num_blocks} blocks of {config.block_size} tokens, "
        f"{config.num_kv_heads} kv heads x {config.head_dim}, {jnp.dtype(config.dtype).name}, "
        f"{config.memory_bytes / 2**20:,.1f} MiB"
    )


def _fullness(cache: PagedKVCache) -> str:
    numbers = allocator.stats(cache.state)
    used, total = int(numbers.used_blocks), cache.config.num_blocks
    return (
        f"{used} of {total} blocks used ({100 * used / total:.0f} %) by {int(numbers.live_seqs)} "
        f"sequences with {int(numbers.tokens)} tokens; {int(numbers.wasted_slots)} slots in tails"
    )


def _owners(state: BlockState) -> list[str]:
    lens, counts = np.asarray(state.seq_lens), np.asarray(state.seq_block_count)
    live = np.flatnonzero(counts)
    lines = [
        f"sequence {seq_id}: {lens[seq_id]} tokens in {counts[seq_id]} blocks"
        for seq_id in live[:_MOST_OWNERS_SHOWN]
    ]
    if len(live) > _MOST_OWNERS_SHOWN:
        lines.append(f"and {len(live) - _MOST_OWNERS_SHOWN} more")
    return lines


def _failures(state: BlockState) -> list[str]:
    word = int(state.errors)
    names = [code.name for code in ResultCode if word & code.bit]
    return [f"failed: {', '.join(names)}"] if names else []
