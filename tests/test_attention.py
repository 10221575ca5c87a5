"""Paged attention against the float64 oracle: every option, many shapes, three dtypes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import paged_kv_jax as pkv

IMPLEMENTATIONS = ("xla", "reference")
OPTIONS = ("scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes")

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def assert_right(case: oracle.Case, implementation: str, **options) -> None:
    """Values to the rounding of the output, LSE to float32."""
    out, lse = oracle.run(case, implementation, **options)
    exact, exact_lse = oracle.attention(case, **options)
    tolerance = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[case.q.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-5)


def case_with(seed: int = 0, **changes) -> oracle.Case:
    """Decode rows, a chunk in the middle, whole prefills, a row that takes no part, and spare places."""
    arguments = dict(
        q_lens=[1, 5, 0, 13, 1], kv_lens=[1, 37, 0, 13, 70], num_tokens=23, head_dim=32, block_size=8,
    )  # fmt: skip
    return oracle.make_case(np.random.default_rng(seed), **{**arguments, **changes})


@each_implementation
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_each_option_alone(implementation: str, option: str | None):
    case = case_with()
    options = oracle.random_options(np.random.default_rng(1), 4, *([option] if option else []))
    assert_right(case, implementation, **options)
    if option:
        plain, _ = oracle.attention(case)
        changed, _ = oracle.attention(case, **options)
        assert np.abs(plain - changed).max() > 1e-2, "the option must matter in this test"


@each_implementation
@pytest.mark.parametrize("left_out", OPTIONS)
def test_all_options_together_but_one(implementation: str, left_out: str):
    names = [name for name in OPTIONS if name != left_out]
    options = oracle.random_options(np.random.default_rng(2), 4, *names)
    assert_right(case_with(seed=3), implementation, **options)


# Shapes and options in pairs rather than in full product: each shape meets an option, each option
# several shapes.
SHAPES = {
    "MHA": (dict(num_heads=4, num_kv_heads=4), ()),
    "MQA": (dict(num_heads=5, num_kv_heads=1), ("sinks",)),
    "G=3": (dict(num_heads=9, num_kv_heads=3, head_dim=64), ("alibi_slopes",)),
    "G=7": (dict(num_heads=14, num_kv_heads=2), ("logits_soft_cap",)),
    "G=16": (dict(num_heads=16, num_kv_heads=1), ("sliding_window", "sinks")),
    "G=63": (dict(num_heads=63, num_kv_heads=1, head_dim=16), ("alibi_slopes",)),
    "head_dim=80": (dict(head_dim=80), ("sliding_window",)),
    "head_dim=96": (dict(head_dim=96), ("sinks", "logits_soft_cap")),
    "head_dim=112": (dict(head_dim=112), ("scale",)),
    "head_dim=120": (dict(head_dim=120), ("alibi_slopes", "sliding_window")),
    "head_dim=128": (dict(head_dim=128), ()),
    "head_dim=192": (dict(head_dim=192), ("logits_soft_cap",)),
    "head_dim=256": (dict(head_dim=256), ("sinks",)),
    "block_size=1": (dict(block_size=1), ("sliding_window",)),
    "block_size=2": (dict(block_size=2), ("alibi_slopes",)),
    "block_size=64": (dict(block_size=64), ("sliding_window", "sinks")),
    "block_size=128": (dict(block_size=128), ()),
    "block_size=256": (dict(block_size=256, spare_blocks=1), ("sliding_window",)),
    "odd table width": (dict(max_blocks=37), ("sinks",)),
    "a table of one column": (
        dict(q_lens=[1, 2], kv_lens=[8, 3], num_tokens=3, max_blocks=1),
        ("alibi_slopes",),
    ),
    "batch 1": (dict(q_lens=[1], kv_lens=[131], num_tokens=1), ("sliding_window",)),
    "one long chunk": (dict(q_lens=[70], kv_lens=[201], num_tokens=70), ("sliding_window",)),
    "longer than a tile": (
        dict(q_lens=[33, 1, 32], kv_lens=[257, 129, 128], num_tokens=66),
        ("alibi_slopes", "sinks"),
    ),
    "more key tiles than xla folds at once": (
        dict(q_lens=[1] * 15, kv_lens=list(range(290, 305)), num_tokens=15, head_dim=16),
        ("sinks",),
    ),
    "one layer": (dict(num_layers=1, layer=0), ()),
    "q wider than the pool": (dict(dtype="bfloat16", q_dtype="float32"), ("sinks",)),
    "q narrower than the pool": (dict(dtype="float32", q_dtype="bfloat16"), ()),
    "q of the other half type": (dict(dtype="float16", q_dtype="bfloat16"), ()),
}


@each_implementation
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(implementation: str, shape: str):
    changes, names = SHAPES[shape]
    case = case_with(seed=4, **changes)
    options = oracle.random_options(np.random.default_rng(5), case.q.shape[1], *names)
    assert_right(case, implementation, **options)


@each_implementation
def test_a_batch_of_1000_rows(implementation: str):
    rng = np.random.default_rng(6)
    kv_lens = rng.integers(0, 30, 1000).tolist()
    case = oracle.make_case(
        rng, q_lens=[1] * 1000, kv_lens=kv_lens, head_dim=16, block_size=4, num_heads=2,
    )  # fmt: skip
    assert_right(case, implementation)


@each_implementation
@pytest.mark.parametrize("window", [1, 2, 8, 16, 33, 10_000])
def test_a_window_sees_exactly_so_many_keys(implementation: str, window: int):
    assert_right(case_with(seed=7), implementation, sliding_window=window)


@each_implementation
def test_a_window_of_one_returns_the_tokens_own_value(implementation: str):
    case = case_with(seed=8, num_heads=2, num_kv_heads=2)
    out, _ = oracle.run(case, implementation, sliding_window=1)
    slots = np.asarray(case.plan().slot_mapping)
    values = case.v_pool[case.layer].reshape(-1, 2, 32)[slots]
    np.testing.assert_array_equal(out, np.where((slots >= 0)[:, None, None], values, 0))


@each_implementation
def test_blocks_behind_the_window_may_be_gone_from_the_table(implementation: str):
    case = case_with(seed=9, q_lens=[1, 3], kv_lens=[70, 37], num_tokens=4)
    whole = oracle.run(case, implementation, sliding_window=10)
    case.block_table[0, : (70 - 10) // 8] = -1
    case.block_table[1, : (37 - 2 - 10) // 8] = -1
    for gone, kept in zip(oracle.run(case, implementation, sliding_window=10), whole, strict=True):
        np.testing.assert_array_equal(gone, kept)


@each_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "options"])
def test_rounding(implementation: str, dtype: str, kind: str):
    lens = dict(q_lens=[1] * 6, kv_lens=[1, 30, 64, 100, 257, 300], num_tokens=6)
    if kind == "prefill":
        lens = dict(q_lens=[40, 7, 1], kv_lens=[40, 150, 260], num_tokens=48)
    names = ("logits_soft_cap", "sinks", "alibi_slopes") if kind == "options" else ()
    case = case_with(seed=10, num_heads=6, head_dim=64, block_size=16, dtype=dtype, **lens)
    options = oracle.random_options(np.random.default_rng(11), 6, *names)
    out, _ = oracle.run(case, implementation, **options)
    oracle.assert_rounds_well(out, case, **options)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_rounding_of_float32(kind: str):
    lens = dict(q_lens=[1] * 6, kv_lens=[1, 30, 64, 100, 257, 300], num_tokens=6)
    if kind == "prefill":
        lens = dict(q_lens=[40, 7, 1], kv_lens=[40, 150, 260], num_tokens=48)
    case = case_with(seed=12, num_heads=6, head_dim=64, block_size=16, **lens)
    out, _ = oracle.run(case, "xla")
    oracle.assert_rounds_well(out, case)


def test_the_reference_is_float64_where_jax_has_it():
    case = case_with(seed=13, head_dim=64)
    with jax.enable_x64(True):
        out, lse = pkv.paged_attention(
            jnp.asarray(case.q), case.pool, case.layer, case.plan(), return_lse=True,
            implementation="reference",
        )  # fmt: skip
    exact, exact_lse = oracle.attention(case)
    # Nothing but the final rounding to float32 is left of the error.
    np.testing.assert_array_equal(np.asarray(out), exact.astype(np.float32))
    np.testing.assert_array_max_ulp(np.asarray(lse), exact_lse.astype(np.float32), maxulp=1)


@each_implementation
def test_large_float16_values_do_not_overflow(implementation: str):
    case = case_with(seed=14, dtype="float16", head_dim=128, magnitude=200.0)
    case.k_pool[...] *= np.float16(50)  # logits far past 65504 before the scale
    case.v_pool[...] *= np.float16(9000)
    out, lse = oracle.run(case, implementation)
    exact, exact_lse = oracle.attention(case)
    assert np.abs(exact_lse[np.isfinite(exact_lse)]).max() > 1e4
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=2e-3, atol=20)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@each_implementation
def test_a_scale_far_from_the_default_acts_before_the_cap(implementation: str):
    assert_right(case_with(seed=15), implementation, scale=2.0, logits_soft_cap=1.5)


@each_implementation
def test_layer_is_an_argument(implementation: str):
    case = case_with(seed=16, num_layers=3, layer=0)
    for layer in range(3):
        object.__setattr__(case, "layer", layer)
        assert_right(case, implementation)


# A row with more queries than keys besides the usual ones.
NON_CAUSAL = dict(
    q_lens=[1, 5, 0, 13, 4], kv_lens=[1, 37, 0, 13, 2], num_tokens=26, poison=float("nan")
)


@each_implementation
@pytest.mark.parametrize("names", [(), ("sinks", "logits_soft_cap", "scale")])
def test_without_causality_every_query_sees_all_keys_of_its_row(implementation: str, names):
    case = case_with(seed=17, **NON_CAUSAL)
    options = oracle.random_options(np.random.default_rng(18), 4, *names)
    out, lse = oracle.run(case, implementation, causal=False, **options)
    exact, exact_lse = oracle.attention(case, causal=False, **options)
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-5)
    causal, _ = oracle.attention(case, **options)
    assert np.abs(causal - exact).max() > 0.1, "causality must matter in this test"


@each_implementation
@pytest.mark.parametrize("option", [dict(sliding_window=4), dict(alibi_slopes=jnp.ones(4))])
def test_raw_kernels_refuse_distances_without_causality(implementation: str, option: dict):
    kernel = importlib.import_module(f"paged_kv_jax.kernels.attention_{implementation}")
    case = case_with()
    with pytest.raises(ValueError, match=f"causal=False.*{next(iter(option))}"):
        kernel.paged_attention(
            *case.raw, max_query_len=case.max_query_len, scale=1.0, causal=False, **option
        )


def test_implementations_are_named_and_unknown_ones_refused():
    case = case_with()
    q, plan = jnp.asarray(case.q), case.plan()
    with pytest.raises(ValueError, match=r"implementation='flash' is not one of .*'reference'"):
        pkv.paged_attention(q, case.pool, 0, plan, implementation="flash")
    with pytest.raises(ValueError, match="'flash'"):
        pkv.supports("flash", q, case.pool, plan)
    for name in IMPLEMENTATIONS:
        assert pkv.supports(name, q, case.pool, plan) == (True, "")


def test_the_default_serves_and_is_the_one_that_supports_names_first():
    case = case_with()
    out = pkv.paged_attention(jnp.asarray(case.q), case.pool, case.layer, case.plan())
    exact, _ = oracle.attention(case)
    np.testing.assert_allclose(out, exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=jnp.ones((23, 128))), ValueError, r"q has shape \(23, 128\)"),
        (dict(q=jnp.ones((22, 4, 32))), ValueError, "q has T=22 tokens and the plan 23"),
        (dict(q=jnp.ones((23, 4, 64))), ValueError, "q has head_dim=64 and the pool 32"),
        (dict(q=jnp.ones((23, 5, 32))), ValueError, "q has H=5 heads; .* multiple of K=2"),
        (dict(q=jnp.ones((23, 4, 32), jnp.int32)), TypeError, "q has dtype int32"),
        (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap=0.0 must be above 0"),
        (dict(logits_soft_cap=-1.0), ValueError, "logits_soft_cap=-1.0"),
        (dict(sliding_window=0), ValueError, "sliding_window=0 must be at least 1"),
        (dict(sinks=jnp.ones(3)), ValueError, r"sinks has shape \(3,\); .* \(4,\)"),
        (dict(alibi_slopes=jnp.ones((4, 1))), ValueError, r"alibi_slopes has shape \(4, 1\)"),
        (dict(sinks=jnp.ones(4, jnp.int32)), TypeError, "sinks has dtype int32"),
        (dict(causal=False, sliding_window=3), ValueError, "causal=False .* sliding_window=3"),
        (dict(causal=False, alibi_slopes=jnp.ones(4)), ValueError, "causal=False .* alibi_slopes"),
    ],
)
def test_static_mistakes_are_refused_by_name(change: dict, error: type, message: str):
    case = case_with()
    arguments = dict(q=jnp.asarray(case.q), pool=case.pool, layer=0, plan=case.plan())
    with pytest.raises(error, match=message):
        pkv.paged_attention(**{**arguments, **change})


def test_a_plan_for_another_block_size_is_refused():
    case, other = case_with(), case_with(block_size=16)
    with pytest.raises(ValueError, match="block_size=16 and the pool 8"):
        pkv.paged_attention(jnp.asarray(case.q), case.pool, 0, other.plan())
