"""`PagedAttention` of NNX and Linen: a ragged prefill and decode give what Flax's own attention gives."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import paged_kv_jax as pkv
from paged_kv_jax.flax import linen as paged_linen
from paged_kv_jax.flax import nnx as paged_nnx
from paged_kv_jax.flax import rotary_embedding

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, HEADS, HEAD_DIM, LAYER = 3, 11, 20, 4, 8, 1
PREFILL = np.array([8, 1, 5], np.int32)
SEQ_IDS = np.array([2, 0, 3], np.int32)  # not in the order of the rows
WINDOW, CAP, SCALE = 4, 1.5, 0.9
SIZES = dict(num_heads=HEADS, in_features=WIDTH, qkv_features=HEADS * HEAD_DIM)
OPTIONS = dict(
    position_embedding=functools.partial(rotary_embedding, theta=100.0),
    sliding_window=WINDOW, logits_soft_cap=CAP, scale=SCALE,
)  # fmt: skip
GROUPED = dict(num_kv_heads=2, out_features=12, normalize_qk=True, use_bias=False)


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))


def rope_window_and_cap(query, key, value, **_):
    """An `attention_fn` of Flax with OPTIONS, written out: q [B, S, H, D], k and v [B, S, K, D]."""

    def rotate(x):
        turn = np.arange(LENGTH)[:, None, None] * 100.0 ** (-np.arange(HEAD_DIM // 2) / 4)
        z = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * np.exp(1j * turn)
        return np.concatenate([z.real, z.imag], axis=-1)

    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    logits = SCALE * np.einsum("bqhd,bkhd->bhqk", rotate(query), rotate(key))
    age = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = (age >= 0) & (age < WINDOW)
    weights = np.where(visible, np.exp(CAP * np.tanh(logits / CAP)), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return jnp.asarray(np.einsum("bhqk,bkhd->bqhd", weights, value), jnp.float32)


def trained(**options) -> nnx.MultiHeadAttention:
    """Flax's module with random weights, biases included."""
    module = nnx.MultiHeadAttention(
        **SIZES, **options, decode=False, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(1)
    )
    if module.query_ln is not None and module.key_ln is not None:
        for seed, norm in enumerate((module.query_ln, module.key_ln)):
            scale = 1 + 0.3 * jax.random.normal(jax.random.key(seed), (HEAD_DIM,))
            norm.scale[...] = scale
    return module


def dense(module: nnx.MultiHeadAttention) -> np.ndarray:
    """What Flax's module gives for `inputs`, causal, without any cache."""
    mask = nnx.make_causal_mask(jnp.zeros((BATCH, LENGTH)))
    return np.asarray(nnx.jit(lambda module, x: module(x, mask=mask))(module, inputs()))


@jax.jit
def prefill_plan(cache):
    cache, result = cache.allocate(SEQ_IDS, PREFILL)
    return cache.plan(SEQ_IDS, PREFILL, result, num_tokens=16)


@jax.jit
def decode_plan(cache, live):
    cache, plan, _ = cache.step(jnp.where(live, SEQ_IDS, -1), 1)
    return cache, plan


def in_paged_steps(attend, num_kv_heads: int = HEADS) -> np.ndarray:
    """`attend` over `inputs`, as [B, S, out]: prompts of PREFILL tokens packed, then one token a step.

    attend(x, positions, pool, plan, layer) -> (y, pool), compiled.
    """
    x = np.asarray(inputs())
    config = pkv.KVCacheConfig(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, num_blocks=14, block_size=4,
        max_seqs=4, max_blocks_per_seq=3, dtype="float32",
    )  # fmt: skip
    cache = pkv.PagedKVCache.create(config)
    pool = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache.pool)
    cache, plan = prefill_plan(cache)
    packed = np.zeros((16, WIDTH), np.float32)
    packed[: PREFILL.sum()] = np.concatenate([x[b, :n] for b, n in enumerate(PREFILL)])
    y, pool = attend(jnp.asarray(packed), plan.positions, pool, plan, LAYER)
    out = np.zeros((BATCH, LENGTH, y.shape[1]), np.float32)
    for b, n in enumerate(PREFILL):
        out[b, :n] = y[plan.cu_q_lens[b] : plan.cu_q_lens[b] + n]
    done = PREFILL.copy()
    while (done < LENGTH).any():
        live = done < LENGTH
        cache, plan = decode_plan(cache, live)
        step_x = x[np.arange(BATCH), np.minimum(done, LENGTH - 1)]
        y, pool = attend(jnp.asarray(step_x), plan.positions, pool, plan, LAYER)
        out[live, done[live]] = np.asarray(y)[live]
        done += live
    pkv.raise_if_failed(cache)
    assert np.isnan(pool.k[0]).all()  # only its own layer was written
    return out


def nnx_steps(module: paged_nnx.PagedAttention, **kinds) -> np.ndarray:
    step = nnx.jit(lambda module, *args: module(*args))
    return in_paged_steps(functools.partial(step, module), **kinds)


def linen_steps(module: paged_linen.PagedAttention, params, **kinds) -> np.ndarray:
    return in_paged_steps(functools.partial(jax.jit(module.apply), {"params": params}), **kinds)


def same(out, expected):
    np.testing.assert_allclose(out, expected, atol=3e-6 * np.abs(expected).max(), rtol=0)


def test_nnx_equals_multi_head_attention_with_its_weights():
    reference = trained()
    paged = paged_nnx.PagedAttention(**SIZES, rngs=nnx.Rngs(2))
    nnx.update(paged, nnx.state(reference, nnx.Param))
    same(nnx_steps(paged), dense(reference))


def test_linen_equals_multi_head_dot_product_attention_with_its_params():
    reference = linen.MultiHeadDotProductAttention(
        HEADS, qkv_features=HEADS * HEAD_DIM, bias_init=linen.initializers.normal()
    )
    params = reference.init(jax.random.key(3), inputs())["params"]
    mask = linen.make_causal_mask(jnp.zeros((BATCH, LENGTH)))
    expected = jax.jit(reference.apply)({"params": params}, inputs(), mask=mask)
    paged = paged_linen.PagedAttention(HEADS, qkv_features=HEADS * HEAD_DIM)
    same(linen_steps(paged, params), np.asarray(expected))


def test_every_option_works_with_grouped_heads_in_both():
    reference = trained(**GROUPED, attention_fn=rope_window_and_cap)
    expected = np.asarray(reference(inputs()))
    assert expected.shape[-1] == 12
    paged = paged_nnx.PagedAttention(**SIZES, **GROUPED, **OPTIONS, rngs=nnx.Rngs(2))
    state = nnx.state(reference, nnx.Param)
    nnx.update(paged, state)
    same(nnx_steps(paged, num_kv_heads=2), expected)

    # The same weights under the same names fit the Linen module.
    sizes = dict(num_heads=HEADS, qkv_features=HEADS * HEAD_DIM)
    same(
        linen_steps(
            paged_linen.PagedAttention(**sizes, **GROUPED, **OPTIONS),
            nnx.to_pure_dict(state),
            num_kv_heads=2,
        ),
        expected,
    )


def test_parameters_have_the_names_and_shapes_of_flaxs_own():
    def shapes(tree):
        return jax.tree.map(jnp.shape, tree)

    for options in ({}, GROUPED):
        paged = paged_nnx.PagedAttention(**SIZES, **options, rngs=nnx.Rngs(0))
        ours, theirs = (
            shapes(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
            for module in (paged, trained(**options))
        )
        assert ours == theirs
        module = paged_linen.PagedAttention(HEADS, qkv_features=HEADS * HEAD_DIM, **options)
        call = example_call(num_kv_heads=options.get("num_kv_heads", HEADS))
        made = jax.eval_shape(lambda x, module=module, rest=call[1:]: module.init(
            jax.random.key(0), x, *rest), call[0])  # fmt: skip
        assert jax.tree.map(lambda leaf: leaf.shape, made["params"]) == theirs


def test_half_precision_stays_half_precision():
    call = example_call()
    paged = paged_nnx.PagedAttention(**SIZES, dtype=jnp.bfloat16, rngs=nnx.Rngs(2))
    module = paged_linen.PagedAttention(HEADS, qkv_features=HEADS * HEAD_DIM, dtype=jnp.bfloat16)
    init = functools.partial(module.init_with_output, jax.random.key(0))
    for y, pool in (
        jax.eval_shape(lambda x: paged(x, *call[1:]), call[0]),
        jax.eval_shape(lambda x: init(x, *call[1:])[0], call[0]),
    ):
        assert y.dtype == pool.k.dtype == pool.v.dtype == jnp.bfloat16


def example_call(shape=(2, WIDTH), num_kv_heads=HEADS):
    """Arguments of a module for two sequences of one token, with a pool in bfloat16."""
    config = pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, num_blocks=2, max_seqs=2,
        max_blocks_per_seq=1,
    )  # fmt: skip
    plan = pkv.plan_from_tables(jnp.array([[0], [1]]), jnp.ones(2, jnp.int32), 1, block_size=16)
    return jnp.zeros(shape), plan.positions, pkv.init_pool(config), plan, 0


def test_what_cannot_work_is_said():
    module = paged_nnx.PagedAttention(**SIZES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has shape \(2, 1, 20\).*without a batch axis"):
        module(*example_call((2, 1, WIDTH)))
    with pytest.raises(ValueError, match=r"x has shape \(2, 7\); it must be \[T, 20\]"):
        module(*example_call((2, 7)))
    with pytest.raises(ValueError, match=r"qkv_features=20 must be a multiple of num_heads=8"):
        paged_nnx.PagedAttention(8, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"num_heads=4 must be a multiple of num_kv_heads=3"):
        paged_linen.PagedAttention(4, num_kv_heads=3).init(jax.random.key(0), *example_call())
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        rotary_embedding(jnp.zeros((1, 1, 5)), jnp.zeros(1, jnp.int32))


def test_without_flax_the_message_says_what_to_install():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "flax":
            raise ModuleNotFoundError("blocked", name=name)
sys.meta_path.insert(0, Blocked())
import paged_kv_jax
try:
    import paged_kv_jax.flax
except ModuleNotFoundError as error:
    print(error, error.name)
"""
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == 'flax is missing: pip install "paged_kv_jax[flax]" flax\n'
