"""A paged KV cache for JAX: an immutable block allocator and kernels over block pools, inside `jax.jit`.

One decode step, for B sequences::

    state, plan, result = pkv.step(state, seq_ids, 1)           # once a step; all layers share it
    pool = pkv.write(pool, layer, k, v, plan)                   # [T, K, D] each
    out = pkv.paged_attention(q, pool, layer, plan)             # [T, H, D]
"""

from paged_kv_jax._version import __version__
from paged_kv_jax.allocator import (
    Stats,
    allocate,
    append,
    block_count,
    block_offset,
    clear_errors,
    free,
    init,
    make_plan,
    stats,
    step,
)
from paged_kv_jax.attention import paged_attention, supports
from paged_kv_jax.cache import PagedKVCache
from paged_kv_jax.cascade import SharedPrefix, merge_attention_states
from paged_kv_jax.compact import compact, resize
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.errors import PagedKVError, ResultCode, raise_if_failed
from paged_kv_jax.eviction import evict, forget, make_room
from paged_kv_jax.groups import GroupedKVCache, LayerGroup
from paged_kv_jax.plan import Plan, plan_from_tables
from paged_kv_jax.pool import KVPool, copy_blocks, init_pool, write, write_prefill, write_token
from paged_kv_jax.prefix import PrefixStats, admit, check_index, commit, match_prefix, prefix_stats
from paged_kv_jax.prefix_table import PrefixIndex, init_prefix_index
from paged_kv_jax.sampling import Sampling
from paged_kv_jax.scheduler import Scheduler, ServingConfig
from paged_kv_jax.server import Request, Server
from paged_kv_jax.serving import run_until, serve_step
from paged_kv_jax.sharing import BlockCopies, fork, release_before, truncate
from paged_kv_jax.state import BlockState, check_invariants
from paged_kv_jax.swap import HostPool, HostSequence, swap_in, swap_out

__all__ = [
    "BlockCopies",
    "BlockState",
    "GroupedKVCache",
    "HostPool",
    "HostSequence",
    "KVCacheConfig",
    "KVPool",
    "LayerGroup",
    "PagedKVCache",
    "PagedKVError",
    "Plan",
    "PrefixIndex",
    "PrefixStats",
    "Request",
    "ResultCode",
    "Sampling",
    "Scheduler",
    "Server",
    "ServingConfig",
    "SharedPrefix",
    "Stats",
    "__version__",
    "admit",
    "allocate",
    "append",
    "block_count",
    "block_offset",
    "check_index",
    "check_invariants",
    "clear_errors",
    "commit",
    "compact",
    "copy_blocks",
    "evict",
    "forget",
    "fork",
    "free",
    "init",
    "init_pool",
    "init_prefix_index",
    "make_plan",
    "make_room",
    "match_prefix",
    "merge_attention_states",
    "paged_attention",
    "plan_from_tables",
    "prefix_stats",
    "raise_if_failed",
    "release_before",
    "resize",
    "run_until",
    "serve_step",
    "stats",
    "step",
    "supports",
    "swap_in",
    "swap_out",
    "truncate",
    "write",
    "write_prefill",
    "write_token",
]
