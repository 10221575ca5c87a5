"""Mosaic GPU paged decode in JAX's GPU interpreter (0.11 and newer): addresses, barriers, splits, masks.

The interpreter runs CTAs one after another, in the order in which a GPU starts them, so that the
partial results of an item are there before the CTA that merges them looks for them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from oracle import assert_rounds_well, attention, make_case, random_options

from paged_kv_jax.kernels import decode_mosaic_gpu as decode

pytestmark = [
    pytest.mark.skipif(
        not hasattr(plgpu, "force_gpu_interpret_mode"),
        reason=f"JAX {jax.__version__} has no Mosaic GPU interpreter; 0.11 has",
    ),
    # The interpreter's products are numpy's, and dead keys are NaN here.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


def run(case, *, ctas, tile_tokens=64, stages=2, **options):
    """(out, lse); with a single CTA, every access is checked for races.

    The interpreter has no semaphores of global memory: with several CTAs it would call each partial
    result a race.
    """
    tuning = decode.Tuning(tile_tokens=tile_tokens, stages=stages, ctas=ctas, concurrent_ctas=False)
    options = {"scale": case.q.shape[-1] ** -0.5, **options}
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=ctas == 1)):
        function = functools.partial(
            decode.paged_attention, max_query_len=case.max_query_len, tuning=tuning, **static
        )
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
    ("ctas", "num_heads", "num_kv_heads"),
    [(1, 4, 2), (7, 4, 2), (12, 3, 1)],
    ids=["one CTA", "cut items", "CTAs without work"],
)
def test_any_number_of_ctas(ctas, num_heads, num_kv_heads):
    # Empty rows, rows without queries, tokens of no row, a row over several CTAs; NaN where nobody looks.
    case = make_case(
        np.random.default_rng(0), q_lens=[1, 1, 0, 1], kv_lens=[70, 0, 20, 330],
        num_heads=num_heads, num_kv_heads=num_kv_heads, dtype="bfloat16", num_tokens=5, poison=np.nan,
    )  # fmt: skip
    check(case, *run(case, ctas=ctas))


@pytest.mark.parametrize("ctas", [1, 4])
def test_every_option_and_several_query_tokens(ctas):
    rng = np.random.default_rng(1)
    options = random_options(
        rng, 6, "scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes"
    )
    # The window is shorter than a tile, and one row has more queries than keys.
    case = make_case(
        rng, q_lens=[3, 1, 2], kv_lens=[140, 90, 1], num_heads=6, num_kv_heads=2, dtype="float16",
    ).with_unseen(np.nan, options["sliding_window"])  # fmt: skip
    check(case, *run(case, ctas=ctas, **options), **options)


@pytest.mark.parametrize("ctas", [1, 3])
def test_blocks_larger_than_a_tile_and_heads_that_need_padding(ctas):
    case = make_case(
        np.random.default_rng(2), q_lens=[1, 1], kv_lens=[200, 30], num_heads=2, num_kv_heads=1,
        head_dim=96, block_size=128, dtype="bfloat16", poison=np.inf,
    )  # fmt: skip
    check(case, *run(case, ctas=ctas))


def test_blocks_of_a_released_row_behind_the_window_are_not_read():
    rng = np.random.default_rng(3)
    case = make_case(rng, q_lens=[1], kv_lens=[150], dtype="bfloat16")
    out, lse = run(case, ctas=2, sliding_window=40)
    case.block_table[0, :6] = -1  # positions 0 to 95; the window begins at 110
    again = run(case, ctas=2, sliding_window=40)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])


def test_many_rows_are_shared_out_in_order():
    rng = np.random.default_rng(4)
    kv_lens = [int(n) for n in rng.integers(0, 12, 45)]
    case = make_case(
        rng, q_lens=[int(n) for n in rng.integers(0, 2, 45)], kv_lens=kv_lens,
        num_heads=1, num_kv_heads=1, head_dim=16, dtype="bfloat16",
    )  # fmt: skip
    check(case, *run(case, ctas=3))
