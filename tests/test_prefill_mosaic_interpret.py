"""Mosaic GPU paged prefill in JAX's GPU interpreter (0.11 and newer): addresses, barriers, splits, masks.

The interpreter blocks a thread of the CPU client for each waiting warp or warpgroup, and hangs where
those are fewer: two warpgroups at most here, and no kernel beside another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from oracle import assert_rounds_well, attention, make_case, random_options

from paged_kv_jax.kernels import attention_mosaic_gpu as both
from paged_kv_jax.kernels import decode_mosaic_gpu as decode
from paged_kv_jax.kernels import prefill_mosaic_gpu as prefill

pytestmark = [
    pytest.mark.skipif(
        not hasattr(plgpu, "force_gpu_interpret_mode"),
        reason=f"JAX {jax.__version__} has no Mosaic GPU interpreter; 0.11 has",
    ),
    # The interpreter's products are numpy's, and dead keys are NaN here.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


def tuning(**sizes) -> prefill.Tuning:
    sizes = dict(warpgroups=2, tile_tokens=64, k_stages=2, v_stages=2, take_turns=True) | sizes
    return prefill.Tuning(interpreted=True, **sizes)


def run(case, *, ctas, sizes=None, **options):
    """(out, lse); with a single CTA, every access is checked for races.

    The interpreter has no semaphores of global memory: with several CTAs it would call each partial
    result a race.
    """
    options = {"scale": case.q.shape[-1] ** -0.5, **options}
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=ctas == 1)):
        function = functools.partial(
            prefill.paged_attention, max_query_len=case.max_query_len,
            tuning=tuning(ctas=ctas, **(sizes or {})), **static,
        )  # fmt: skip
        out, lse = jax.jit(function)(*case.raw, **arrays)
        out, lse = np.asarray(out), np.asarray(lse)
    if ctas == 1:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        assert not gpu_callbacks.get_races().races_found
    return out, lse


def check(case, out, lse, **options) -> None:
    assert_rounds_well(out, case, **options)
    _, exact_lse = attention(case, **options)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ctas", "sizes"), [(1, {}), (7, {"q_slots": 1, "v_stages": 3, "take_turns": False})]
)
def test_any_number_of_ctas(ctas, sizes):
    # Empty rows, rows without queries, tails, tokens of no row, an item over several CTAs.
    case = make_case(
        np.random.default_rng(0), q_lens=[70, 0, 9, 3], kv_lens=[150, 20, 9, 0],
        num_heads=4, num_kv_heads=2, dtype="bfloat16", num_tokens=147, poison=np.nan,
    )  # fmt: skip
    check(case, *run(case, ctas=ctas, sizes=sizes))


def test_every_option():
    rng = np.random.default_rng(1)
    options = random_options(rng, 3, "scale", "logits_soft_cap", "sinks", "alibi_slopes")
    options["sliding_window"] = 70
    # One row has more queries than keys; three heads leave two tiles of tokens of one head an item.
    case = make_case(
        rng, q_lens=[130, 20], kv_lens=[200, 10], num_heads=3, num_kv_heads=1, dtype="float16",
        num_tokens=230,
    ).with_unseen(np.nan, options["sliding_window"])  # fmt: skip
    check(case, *run(case, ctas=3, sizes={"tile_tokens": 128}, **options), **options)


def test_without_a_causal_mask_every_query_sees_the_whole_row():
    queries, kv_len = 40, 100
    # What it should be: each query the last one of a row of its own.
    rows = make_case(
        np.random.default_rng(2), q_lens=[1] * queries, kv_lens=[kv_len] + [0] * (queries - 1),
        num_heads=2, num_kv_heads=1, dtype="bfloat16", num_tokens=64, poison=np.nan,
    )  # fmt: skip
    rows = dataclasses.replace(
        rows,
        block_table=np.repeat(rows.block_table[:1], queries, axis=0),
        kv_lens=np.full(queries, kv_len, np.int32),
    )
    one = dataclasses.replace(
        rows,
        block_table=rows.block_table[:1],
        kv_lens=rows.kv_lens[:1],
        cu_q_lens=np.array([0, queries], np.int32),
    )
    check(rows, *run(one, ctas=2, causal=False))


def test_decode_rows_among_longer_ones(monkeypatch):
    case = make_case(
        np.random.default_rng(3), q_lens=[1, 20, 0, 1, 3, 1], kv_lens=[50, 30, 20, 1, 40, 0],
        num_heads=2, num_kv_heads=1, dtype="bfloat16", num_tokens=90, poison=np.nan,
    )  # fmt: skip
    few = decode.Tuning(tile_tokens=64, stages=2, ctas=2, concurrent_ctas=False)
    for module, sizes in ((prefill, tuning(ctas=2)), (decode, few)):
        function = functools.partial(module.paged_attention, tuning=sizes)
        monkeypatch.setattr(module, "paged_attention", function)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out, lse = both.paged_attention(*case.raw, max_query_len=20, scale=0.125)
        check(case, np.asarray(out), np.asarray(lse))
