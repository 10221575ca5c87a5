"""Mosaic GPU paged decode on a Hopper GPU: option by shape against float64, poison, huge pools."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_rounds_well, attention, make_case, random_options

from paged_kv_jax.kernels import decode_mosaic_gpu as decode

pytestmark = pytest.mark.gpu

ALL_OPTIONS = ("scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes")

# (H, K), D, P, dtype, max_query_len, options: every value of each beside several of the others.
MATRIX = [
    ((32, 8), 128, 16, "bfloat16", 1, ()),
    ((32, 8), 128, 1, "bfloat16", 1, ("sliding_window",)),
    ((32, 8), 128, 64, "float16", 8, ("logits_soft_cap",)),
    ((32, 8), 128, 256, "bfloat16", 3, ALL_OPTIONS),
    ((9, 3), 64, 16, "bfloat16", 1, ("sinks",)),
    ((9, 3), 64, 2, "float16", 4, ("alibi_slopes",)),
    ((10, 2), 96, 8, "bfloat16", 2, ("sliding_window", "sinks")),
    ((28, 4), 128, 32, "bfloat16", 5, ("scale",)),
    ((63, 1), 64, 16, "bfloat16", 1, ("logits_soft_cap", "alibi_slopes")),
    ((71, 1), 64, 128, "bfloat16", 2, ()),
    ((32, 1), 128, 16, "bfloat16", 8, ("sliding_window",)),
    ((64, 1), 256, 16, "float16", 1, ("sinks",)),
    ((8, 8), 128, 16, "bfloat16", 1, ALL_OPTIONS),
    ((12, 12), 64, 4, "float16", 8, ()),
    ((16, 1), 192, 16, "bfloat16", 3, ("alibi_slopes",)),
    ((64, 4), 192, 64, "float16", 1, ("logits_soft_cap",)),
    ((8, 4), 256, 8, "bfloat16", 8, ALL_OPTIONS),
    ((8, 2), 80, 16, "float16", 1, ALL_OPTIONS),
    ((6, 2), 112, 4, "bfloat16", 2, ("sinks",)),
    ((4, 2), 32, 16, "bfloat16", 1, ()),
    ((40, 40), 128, 16, "bfloat16", 1, ("sliding_window",)),
]


@functools.cache
def compiled(max_query_len, **static):
    return jax.jit(functools.partial(decode.paged_attention, max_query_len=max_query_len, **static))


def run(case, **options):
    """(out, lse) of the kernel on a case of the oracle."""
    options = {"scale": case.q.shape[-1] ** -0.5, **options}
    arrays = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in arrays}
    out, lse = compiled(case.max_query_len, **static)(*case.raw, **arrays)
    return np.asarray(out), np.asarray(lse)


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype", "q_len", "names"), MATRIX)
def test_matches_float64_and_never_sees_dead_slots(
    heads, head_dim, block_size, dtype, q_len, names
):
    rng = np.random.default_rng(0)
    # Rows shorter than their queries, empty rows, rows without queries, and one that many CTAs share.
    q_lens = [q_len, q_len, 1, 0, q_len, q_len, 1]
    kv_lens = [300, 1, 0, 70, 129, 64 + q_len, 1500]
    case = make_case(
        rng,
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_tokens=sum(q_lens) + 3,
    )
    options = random_options(rng, heads[0], *names)
    window = options.get("sliding_window")
    out, lse = run(case.with_unseen(np.nan, window), **options)
    assert_rounds_well(out, case, **options)
    _, exact_lse = attention(case, **options)
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-5, atol=2e-5)
    for value in (0.0, np.inf):
        other_out, other_lse = run(case.with_unseen(value, window), **options)
        np.testing.assert_array_equal(bits(out), bits(other_out))
        np.testing.assert_array_equal(bits(lse), bits(other_lse))


def test_large_float16_values_do_not_overflow():
    case = make_case(
        np.random.default_rng(1),
        q_lens=[1, 1],
        kv_lens=[900, 40],
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        dtype="float16",
        magnitude=300.0,
    )
    out, _ = run(case)
    assert_rounds_well(out, case)


def test_thousand_rows_of_any_length_compile_once_and_give_the_same_bits():
    rng = np.random.default_rng(2)
    function = jax.jit(functools.partial(decode.paged_attention, max_query_len=1, scale=0.125))
    for longest in (40, 3):
        kv_lens = [int(n) for n in rng.integers(0, longest, 1000)]
        case = make_case(
            rng, q_lens=[1] * 1000, kv_lens=kv_lens, spare_blocks=4000 - sum(-(-n // 16) for n in kv_lens),
            num_heads=8, num_kv_heads=8, head_dim=64, dtype="bfloat16", max_blocks=40,
        )  # fmt: skip
        out, lse = function(*case.raw)
        assert_rounds_well(out, case)
        for _ in range(3):
            again = function(*case.raw)
            np.testing.assert_array_equal(bits(out), bits(again[0]))
            np.testing.assert_array_equal(bits(lse), bits(again[1]))
    assert function._cache_size() == 1


def test_blocks_past_two_to_the_31_elements():
    rng = np.random.default_rng(3)
    kv_lens, block_size, num_kv_heads, head_dim = [2000, 700], 16, 8, 128
    small = make_case(
        rng, q_lens=[1, 1], kv_lens=kv_lens, num_heads=32, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype="bfloat16", spare_blocks=0, num_layers=1, layer=0,
    )  # fmt: skip
    num_blocks = 70_000  # of each of 2 layers: 2.3e9 elements a pool
    live = small.k_pool.shape[1]
    top = num_blocks - live

    @jax.jit
    def huge(values):
        pool = jnp.full((2, num_blocks, block_size, num_kv_heads, head_dim), jnp.nan, values.dtype)
        return pool.at[1, top:].set(values[0])

    table = np.where(small.block_table >= 0, small.block_table + top, -1).astype(np.int32)
    pools = [huge(jnp.asarray(pool)) for pool in (small.k_pool, small.v_pool)]
    assert pools[0].size > 2**31
    out, _ = compiled(1, scale=head_dim**-0.5)(
        jnp.asarray(small.q), *pools, jnp.int32(1), jnp.asarray(table),
        jnp.asarray(small.kv_lens), jnp.asarray(small.cu_q_lens),
    )  # fmt: skip
    expected, _ = run(small)
    assert_rounds_well(np.asarray(out), small)
    np.testing.assert_array_equal(bits(out), bits(expected))


def test_layers_of_a_scan_do_not_copy_the_pool():
    case = make_case(
        np.random.default_rng(4), q_lens=[1, 1], kv_lens=[100, 30], num_heads=8, num_kv_heads=2,
        head_dim=128, dtype="bfloat16", num_layers=3, spare_blocks=3000,
    )  # fmt: skip
    q, k_pool, v_pool, _, *rest = case.raw

    @jax.jit
    def layers(q, k_pool, v_pool, *rest):
        def layer(q, index):
            out, _ = decode.paged_attention(
                q, k_pool, v_pool, index, *rest, max_query_len=1, scale=0.1
            )
            return out, out

        return jax.lax.scan(layer, q, jnp.arange(3))[1]

    memory = layers.lower(q, k_pool, v_pool, *rest).compile().memory_analysis()
    assert memory.temp_size_in_bytes < k_pool.nbytes // 10
    outs = layers(q, k_pool, v_pool, *rest)
    for index in range(3):
        out, _ = decode.paged_attention(q, k_pool, v_pool, index, *rest, max_query_len=1, scale=0.1)
        np.testing.assert_array_equal(bits(outs[index]), bits(out))
        q = out
