"""Pallas Triton decode and write: values in interpret mode against float64, lowering for CUDA, and
the same on a GPU."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from paged_kv_jax.kernels import triton

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

OPTIONS = ("scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes")


def compiled(case, options, interpret=True):
    """The kernel with these options, for cases of this one's shapes."""
    given = {name: jnp.asarray(v) if np.ndim(v) else v for name, v in options.items()}
    given.setdefault("scale", case.q.shape[-1] ** -0.5)
    kernel = functools.partial(triton.paged_attention, interpret=interpret, **given)
    return jax.jit(functools.partial(kernel, max_query_len=case.max_query_len))


def assert_right(case, options, interpret=True):
    out, lse = map(np.asarray, compiled(case, options, interpret)(*case.raw))
    exact, expected = oracle.attention(case, **options)
    if interpret or case.q.dtype != np.float32:
        oracle.assert_rounds_well(out, case, **options)
    else:  # the GPU's exp2 is a few units in the last place off, which only float32 shows
        np.testing.assert_allclose(out, exact, rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected))
    tolerance = 1e-5 if case.q.dtype == np.float32 else 5e-3
    live = ~np.isneginf(expected)
    np.testing.assert_allclose(lse[live], expected[live], rtol=tolerance, atol=tolerance)


def lower(function, *args):
    """Lower for CUDA as if for an H100: newer JAX asks the backend for a device to lower for."""
    context = contextlib.nullcontext()
    if "abstract_device" in inspect.signature(jax.sharding.AbstractMesh).parameters:
        device = jax.sharding.AbstractDevice(  # pyright: ignore[reportAttributeAccessIssue]
            "NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
        )
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        context = jax.sharding.use_abstract_mesh(mesh)
    with context:
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def ragged(rng, **kwargs):
    """Rows with 1, 3 and 2 query tokens, an empty row, and more queries than keys."""
    sizes = dict(q_lens=[1, 3, 1, 2, 5], kv_lens=[70, 33, 0, 2, 3], num_tokens=14)
    return oracle.make_case(rng, **(sizes | kwargs))


@pytest.mark.parametrize(
    "names",
    [["sliding_window"], ["scale", "sinks"], ["logits_soft_cap", "alibi_slopes"], OPTIONS],
    ids="+".join,
)
def test_options(names):
    rng = np.random.default_rng(0)
    case = ragged(rng, num_heads=6, num_kv_heads=2, head_dim=80, poison=np.nan)
    assert_right(case, oracle.random_options(rng, 6, *names))


@pytest.mark.parametrize(("group", "head_dim"), [(1, 96), (3, 64), (5, 128), (16, 256)])
def test_groups_and_head_dims(group, head_dim):
    rng = np.random.default_rng(1)
    assert_right(
        ragged(rng, num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype="bfloat16"), {}
    )


@pytest.mark.parametrize("block_size", [1, 8, 64, 256])
def test_block_sizes(block_size):
    rng = np.random.default_rng(2)
    assert_right(ragged(rng, block_size=block_size, head_dim=128, dtype="float16"), {})


def test_more_query_rows_than_a_tile():
    rng = np.random.default_rng(3)
    case = ragged(rng, num_heads=63, num_kv_heads=1, head_dim=64)
    assert_right(case, oracle.random_options(rng, 63, "sinks", "alibi_slopes"))


def test_large_float16_values_do_not_overflow():
    rng = np.random.default_rng(4)
    case = ragged(rng, head_dim=128, dtype="float16", magnitude=500.0)
    assert_right(case, {})


def assert_unseen_slots_do_not_matter(sliding_window, interpret):
    case = ragged(np.random.default_rng(5), dtype="float16")
    options = {} if sliding_window is None else {"sliding_window": sliding_window}
    attend = compiled(case, options, interpret)
    zeros = attend(*case.with_unseen(0.0, sliding_window).raw)
    for value in (np.nan, np.inf, 60000.0):
        poisoned = attend(*case.with_unseen(value, sliding_window).raw)
        for a, b in zip(poisoned, zeros, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_unseen_slots_do_not_change_a_bit(sliding_window):
    assert_unseen_slots_do_not_matter(sliding_window, interpret=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "max_query_len"),
    [(32, 8, 128, 16, 1), (9, 3, 64, 1, 1), (5, 1, 80, 64, 8), (16, 1, 256, 8, 2)],
)
def test_decode_lowers_for_cuda(
    dtype, num_heads, num_kv_heads, head_dim, block_size, max_query_len
):
    rng = np.random.default_rng(6)
    case = oracle.make_case(
        rng,
        q_lens=[max_query_len] * 3,
        kv_lens=[40, 50, 60],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    options = oracle.random_options(rng, num_heads, *OPTIONS)
    given = {name: jnp.asarray(v) if np.ndim(v) else v for name, v in options.items()}
    for chosen in (given, {"scale": 0.1}):
        text = lower(
            lambda *raw, chosen=chosen: triton.paged_attention(
                *raw, max_query_len=max_query_len, **chosen
            ),
            *case.raw,
        )
        assert "paged_kv_decode_triton" in text


def write_case(num_kv_heads, head_dim, dtype):
    rng = np.random.default_rng(7)
    pools = [
        rng.standard_normal((2, 5, 4, num_kv_heads, head_dim)).astype(jnp.dtype(dtype))
        for _ in range(2)
    ]
    slots = [3, -1, 19, 20, 0, 2**31 - 1, 7]
    new = [
        rng.standard_normal((len(slots), num_kv_heads, head_dim)).astype(np.float32)
        for _ in range(2)
    ]
    expected = [pool.copy() for pool in pools]
    for token, slot in enumerate(slots):
        if 0 <= slot < 20:
            for pool, tokens in zip(expected, new, strict=True):
                pool[1, slot // 4, slot % 4] = tokens[token].astype(pool.dtype)
    args = *map(jnp.asarray, pools), jnp.int32(1), *map(jnp.asarray, new), jnp.asarray(slots)
    return args, expected


def assert_writes(shape, interpret):
    args, expected = write_case(*shape)
    written = jax.jit(functools.partial(triton.write, interpret=interpret))(*args)
    for got, want in zip(written, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


WRITE_SHAPES = [(8, 128, "bfloat16"), (3, 64, "float16"), (1, 80, "float32"), (9, 256, "bfloat16")]


@pytest.mark.parametrize("shape", WRITE_SHAPES)
def test_write_puts_tokens_into_their_slots_and_drops_the_others(shape):
    assert_writes(shape, interpret=True)


@pytest.mark.parametrize("shape", WRITE_SHAPES)
def test_write_lowers_for_cuda_and_aliases_both_pools(shape):
    text = lower(triton.write, *write_case(*shape)[0])
    assert "paged_kv_write_triton" in text
    assert text.count("output_operand_alias<") == 2


def test_says_what_it_does_not_serve():
    case = ragged(np.random.default_rng(8), head_dim=320)
    q, pool = case.raw[:2]
    reason = functools.partial(triton.paged_attention_unsupported_reason, compute_capability=8.0)
    assert "head_dim=320" in str(reason(q, pool, max_query_len=1))
    assert "max_query_len=9" in str(reason(q[..., :64], pool, max_query_len=9))
    assert "float8" in str(reason(q, pool.astype(jnp.float8_e4m3fn), max_query_len=1))
    assert "8.0" in str(triton.write_unsupported_reason(pool, compute_capability=7.5))
    assert "None" in str(triton.write_unsupported_reason(pool))
    assert reason(q[..., :64], pool, max_query_len=8) is None


GPU_SHAPES = [
    dict(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16),
    dict(num_heads=9, num_kv_heads=3, head_dim=64, block_size=1),
    dict(num_heads=5, num_kv_heads=1, head_dim=80, block_size=64),
    dict(num_heads=16, num_kv_heads=1, head_dim=256, block_size=8),
    dict(num_heads=63, num_kv_heads=1, head_dim=96, block_size=256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("names", [(), OPTIONS], ids="+".join)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_decode_shapes_on_the_gpu(dtype, names, shape):
    rng = np.random.default_rng(9)
    case = ragged(rng, dtype=dtype, poison=np.nan, **shape)
    assert_right(case, oracle.random_options(rng, shape["num_heads"], *names), interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_options_on_the_gpu(dtype, name):
    rng = np.random.default_rng(10)
    case = ragged(rng, dtype=dtype, poison=np.nan, kv_lens=[900, 333, 0, 2, 3], **GPU_SHAPES[0])
    assert_right(case, oracle.random_options(rng, 8, name), interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_unseen_slots_do_not_change_a_bit_on_the_gpu(sliding_window):
    assert_unseen_slots_do_not_matter(sliding_window, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", WRITE_SHAPES)
def test_write_on_the_gpu(shape):
    assert_writes(shape, interpret=False)


@pytest.mark.gpu
def test_decode_reads_the_top_of_a_huge_pool():
    rng = np.random.default_rng(10)
    case = ragged(
        rng, num_heads=8, num_kv_heads=8, head_dim=256, dtype="bfloat16", num_layers=1, layer=0
    )
    num_blocks = 70_000  # 2.3e9 elements: offsets need more than 31 bits
    top = num_blocks - case.k_pool.shape[1]
    q, k_pool, v_pool, layer, table, *lens = case.raw
    huge = jnp.zeros((1, num_blocks, *k_pool.shape[2:]), jnp.bfloat16)
    k_pool, v_pool = (huge.at[:, top:].set(pool) for pool in (k_pool, v_pool))
    table = jnp.where(table < 0, table, table + top)
    out, _ = compiled(case, {}, interpret=False)(q, k_pool, v_pool, layer, table, *lens)
    oracle.assert_rounds_well(out, case)
