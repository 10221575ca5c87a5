"""Which implementation is picked, on GPUs that are not here: only shapes, dtypes and options count."""

import jax
import jax.numpy as jnp
import pytest

import paged_kv_jax as pkv
from paged_kv_jax import dispatch


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretend that JAX's default device is a GPU of some compute capability."""
    return lambda capability: monkeypatch.setattr(
        dispatch, "compute_capability", lambda: capability
    )


def call(*, head_dim=128, block_size=16, query_len=1, dtype=jnp.bfloat16, pool_dtype=None):
    """q, pool and plan as shapes, for two rows of 8 query heads over 2 kv heads."""
    shape = jax.ShapeDtypeStruct((3, 64, block_size, 2, head_dim), pool_dtype or dtype)
    plan = jax.eval_shape(
        lambda: pkv.plan_from_tables(
            jnp.zeros((2, 8), jnp.int32), jnp.ones(2, jnp.int32), query_len, block_size=block_size
        )
    )
    q = jax.ShapeDtypeStruct((2 * query_len, 8, head_dim), dtype)
    return q, pkv.KVPool(k=shape, v=shape), plan


def picked(q, pool, plan):
    kernel = dispatch.choose("paged_attention", None, q, pool.k, max_query_len=plan.max_query_len)
    return kernel.__module__.rsplit(".", 1)[1]


@pytest.mark.parametrize(
    ("capability", "shapes", "module"),
    [
        (None, {}, "attention_xla"),
        (7.5, {}, "attention_xla"),
        (8.0, {}, "triton"),
        (8.9, {"query_len": 8}, "triton"),
        (9.0, {}, "attention_mosaic_gpu"),
        (9.0, {"query_len": 8, "head_dim": 64, "block_size": 1}, "attention_mosaic_gpu"),
        (9.0, {"query_len": 9}, "attention_mosaic_gpu"),
        (9.0, {"query_len": 9, "head_dim": 120}, "attention_xla"),
        (9.0, {"head_dim": 120}, "triton"),
        (9.0, {"dtype": jnp.float32}, "triton"),
        (9.0, {"head_dim": 512}, "attention_xla"),
        (10.0, {}, "triton"),
    ],
)
def test_the_best_that_supports_the_call_is_picked(on_gpu, capability, shapes, module):
    on_gpu(capability)
    assert picked(*call(**shapes)) == module


def test_supports_gives_the_reason(on_gpu):
    on_gpu(9.0)
    assert pkv.supports("mosaic_gpu", *call()) == (True, "")
    is_supported, reason = pkv.supports("mosaic_gpu", *call(head_dim=120))
    assert not is_supported
    assert "head_dim=120" in reason
    assert pkv.supports("xla", *call(head_dim=120)) == (True, "")


def test_without_a_gpu_the_reason_is_the_device():
    is_supported, reason = pkv.supports("mosaic_gpu", *call())
    assert not is_supported
    assert "needs an NVIDIA GPU" in reason


@pytest.mark.parametrize(
    ("name", "shapes", "named"),
    [
        ("mosaic_gpu", {"head_dim": 120}, "head_dim=120"),
        ("triton", {"query_len": 9}, "max_query_len=9"),
    ],
)
def test_a_name_that_cannot_serve_raises_with_the_reason_and_never_falls_back(
    on_gpu, name, shapes, named
):
    on_gpu(9.0)
    q, pool, plan = call(**shapes)
    with pytest.raises(NotImplementedError, match=rf"{name}.*{named}"):
        dispatch.choose("paged_attention", name, q, pool.k, max_query_len=plan.max_query_len)


@pytest.mark.parametrize("operation", list(dispatch.IMPLEMENTATIONS))
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(operation):
    there_are = ", ".join(map(repr, dispatch.IMPLEMENTATIONS[operation]))
    with pytest.raises(ValueError, match=f"'cuda' is not one of {there_are}"):
        dispatch.choose(operation, "cuda", None)


@pytest.mark.parametrize(
    ("operation", "capability", "module"),
    [
        ("write", None, "write_xla"), ("write", 8.0, "triton"), ("write", 9.0, "write_mosaic_gpu"),
        ("copy_blocks", None, "write_xla"), ("copy_blocks", 8.0, "write_xla"),
        ("copy_blocks", 9.0, "copy_mosaic_gpu"),
    ],
)  # fmt: skip
def test_writes_and_copies_pick_likewise(on_gpu, operation, capability, module):
    on_gpu(capability)
    kernel = dispatch.choose(operation, None, call()[1].k)
    assert kernel.__module__ == f"paged_kv_jax.kernels.{module}"


def test_every_implementation_of_the_table_has_its_function():
    import importlib

    for operation, modules in dispatch.IMPLEMENTATIONS.items():
        for module in filter(None, modules.values()):
            kernels = importlib.import_module(f"paged_kv_jax.kernels.{module}")
            assert callable(getattr(kernels, operation))
