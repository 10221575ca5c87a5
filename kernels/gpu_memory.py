"""Loads, stores and semaphores of Mosaic GPU kernels, alike in all versions of JAX."""

import inspect
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOAD_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_NEEDS_INDEX = _LOAD_INDEX is not None and _LOAD_INDEX.default is inspect.Parameter.empty
_store_to = getattr(plgpu, "store", None)
semaphore_signal = getattr(plgpu, "semaphore_signal", pl.semaphore_signal)
semaphore_wait = getattr(plgpu, "semaphore_wait", pl.semaphore_wait)
THIS_GPU: dict[str, Any] = (
    {"memory_scope": "gpu"}
    if "memory_scope" in inspect.signature(semaphore_wait).parameters
    else {}
)


def load(ref, layout) -> jax.Array:
    """The values of a ref, however its layout fits the registers'."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref, value: jax.Array) -> None:
    """ref[...] = value, however its layout fits the registers'."""
    if _store_to is None:
        ref[...] = value
    else:
        _store_to(ref, value, optimized=False)
