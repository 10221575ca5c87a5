"""Models whose layers see different lengths: a block table for each group of layers.

Layers with a sliding window need the last w tokens only. With a table of their own, the blocks behind
the window go back while the layers with full attention keep theirs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from paged_kv_jax.cache import PagedKVCache
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that share a block table and a pool.

    Attributes:
      layers: the model's layers in the group.
      num_blocks: N of the group's pool. A window of w tokens takes at most
        `ceil((w + n - 1) / P) + 1` blocks of a sequence that brings n tokens a step.
      sliding_window: keys that a query of these layers sees, its own included; None for all.
    """

    layers: tuple[int, ...]
    num_blocks: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1, or None")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("caches",), meta_fields=("groups",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedKVCache:
    """One `PagedKVCache` for each group of layers; a sequence has the same id and length in all.

    All or nothing across the groups: a row that fails in one is undone in the others.

    Attributes:
      groups: the groups (static).
      caches: a cache for each group, whose layer i is the group's `layers[i]`.
    """

    groups: tuple[LayerGroup, ...]
    caches: tuple[PagedKVCache, ...]

    @classmethod
    def create(cls, config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Self:
        """Empty caches.

        Args:
          config: the geometry; each group has its own number of blocks instead of `num_blocks`.
          groups: every layer of the model in exactly one of them.
        """
        layers = sorted(layer for group in groups for layer in group.layers)
        if layers != list(range(config.num_layers)):
            raise ValueError(
                f"the groups hold layers {layers}; each of 0 to {config.num_layers - 1} must be in "
                "exactly one"
            )
        configs = (
            dataclasses.replace(config, num_layers=len(group.layers), num_blocks=group.num_blocks)
            for group in groups
        )
        return cls(groups=tuple(groups), caches=tuple(map(PagedKVCache.create, configs)))

    @property
    def errors(self) -> jax.Array:
        """int32 [], the sticky words of all groups."""
        return functools.reduce(jnp.bitwise_or, [cache.errors for cache in self.caches])

    @property
    def seq_lens(self) -> jax.Array:
        """int32 [S], tokens of each sequence."""
        return self.caches[0].state.seq_lens

    def allocate(self, seq_ids: jax.Array, num_tokens: jax.Array | int) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.allocate` in every group; the result is the first group's, or the failure."""
        grown = [cache.allocate(seq_ids, num_tokens) for cache in self.caches]
        return self._all_or_nothing(seq_ids, grown)

    def step(
        self, seq_ids: jax.Array, num_new_tokens: jax.Array | int = 1, **options: Any
    ) -> tuple[Self, tuple[Plan, ...], jax.Array]:
        """One step of live sequences: what no query will see goes back, then append and plan.

        Args:
          seq_ids: int32 [B], live sequences, each at most once; -1 for a padding row.
          num_new_tokens: an int for every row alike, or int32 [B] with `num_tokens` = T.
          **options: `num_tokens`, `max_query_len`, `shared_prefix`, as for `make_plan`.

        Returns:
          The new cache, a plan for each group, and int32 [B], the result of `append`.
        """
        next_position = _lens(self.seq_lens, seq_ids)
        grown = []
        for group, cache in zip(self.groups, self.caches, strict=True):
            if group.sliding_window is not None:
                live = jnp.where(next_position > 0, seq_ids, -1)
                cache, _ = cache.release_before(live, next_position - group.sliding_window + 1)
            grown.append(cache.append(seq_ids, num_new_tokens))
        grouped, result = self._all_or_nothing(seq_ids, grown)
        grouped, plans = grouped.plan(seq_ids, num_new_tokens, result, **options)
        return grouped, plans, result

    def plan(
        self, seq_ids: jax.Array, num_new_tokens: jax.Array | int, result: jax.Array, **options: Any
    ) -> tuple[Self, tuple[Plan, ...]]:
        """`paged_kv_jax.make_plan` in every group."""
        planned = [cache.plan(seq_ids, num_new_tokens, result, **options) for cache in self.caches]
        caches, plans = zip(*planned, strict=True)
        return dataclasses.replace(self, caches=caches), plans

    def truncate(self, seq_ids: jax.Array, new_lens: jax.Array) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.truncate` in every group; not further back than the last step began."""
        shortened = [cache.truncate(seq_ids, new_lens) for cache in self.caches]
        caches, results = zip(*shortened, strict=True)
        return dataclasses.replace(self, caches=caches), _combined(results)

    def free(self, seq_ids: jax.Array) -> tuple[Self, jax.Array]:
        """`paged_kv_jax.free` in every group."""
        caches, results = zip(*(cache.free(seq_ids) for cache in self.caches), strict=True)
        return dataclasses.replace(self, caches=caches), _combined(results)

    def write(self, layer: int, k: jax.Array, v: jax.Array, plans: tuple[Plan, ...]) -> Self:
        """`paged_kv_jax.write` into the pool of the group that the (static) layer is in."""
        group, nth = self._find(layer)
        caches = list(self.caches)
        caches[group] = caches[group].write(nth, k, v, plans[group])
        return dataclasses.replace(self, caches=tuple(caches))

    def attend(self, q: jax.Array, layer: int, plans: tuple[Plan, ...], **options: Any) -> Any:
        """`paged_kv_jax.paged_attention` with the window of the group the (static) layer is in."""
        group, nth = self._find(layer)
        window = self.groups[group].sliding_window
        return self.caches[group].attend(q, nth, plans[group], sliding_window=window, **options)

    def _find(self, layer: int) -> tuple[int, int]:
        for nth, group in enumerate(self.groups):
            if layer in group.layers:
                return nth, group.layers.index(layer)
        raise ValueError(f"{layer=} is in none of the groups")

    def _all_or_nothing(
        self, seq_ids: jax.Array, grown: list[tuple[PagedKVCache, jax.Array]]
    ) -> tuple[Self, jax.Array]:
        """Undo each row that failed in some group where it did not."""
        result = _combined([result for _, result in grown])
        old_lens = _lens(self.seq_lens, seq_ids)
        caches = []
        for cache, own in grown:
            undone = (own >= 0) & (result < 0) & (_lens(cache.state.seq_lens, seq_ids) > 0)
            caches.append(cache.truncate(jnp.where(undone, seq_ids, -1), old_lens)[0])
        return dataclasses.replace(self, caches=tuple(caches)), result


def _combined(results: Sequence[jax.Array]) -> jax.Array:
    """int32 [B]: the first group's result, or the lowest code where a group failed."""
    worst = functools.reduce(jnp.minimum, results)
    return jnp.where(worst < 0, worst, results[0])


def _lens(seq_lens: jax.Array, seq_ids: jax.Array) -> jax.Array:
    """int32 [B]: lengths of rows; 0 for padding and what is out of range."""
    in_range = (seq_ids >= 0) & (seq_ids < seq_lens.shape[0])
    return jnp.where(in_range, seq_lens[jnp.where(in_range, seq_ids, 0)], 0)
