"""Which kernel serves a call: the table of implementations, and the one place that chooses.

`implementation=None` takes the first of the table that supports the call and logs, once, which it
was and why those before it could not. A name forces its implementation and raises where it cannot
serve. Kernels are imported when they are first asked about: importing Mosaic GPU takes half a second.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

# Operation -> implementation -> module of paged_kv_jax.kernels, best first; None where the caller's own
# XLA operations serve.
IMPLEMENTATIONS: dict[str, dict[str, str | None]] = {
    "paged_attention": {
        "mosaic_gpu": "attention_mosaic_gpu",
        "triton": "triton",
        "xla": "attention_xla",
        "reference": "attention_reference",
    },
    "write": {"mosaic_gpu": "write_mosaic_gpu", "triton": "triton", "xla": "write_xla"},
    "copy_blocks": {"mosaic_gpu": "copy_mosaic_gpu", "xla": "write_xla"},
    "step": {"triton": "allocator_step_triton", "xla": None},
}
# These serve every call on every platform.
_EVERYWHERE = ("xla", "reference")


def compute_capability() -> float | None:
    """CUDA compute capability of JAX's default device; None if that is no NVIDIA GPU."""
    try:
        return float(_default_device().compute_capability)
    except (AttributeError, ValueError):
        return None


def unsupported_reason(operation: str, name: str, *args: Any, **options: Any) -> str | None:
    """Why implementation `name` cannot serve the call; None if it can.

    Raises:
      ValueError: there is no such implementation.
    """
    modules = IMPLEMENTATIONS[operation]
    if name not in modules:
        raise ValueError(
            f"implementation={name!r} is not one of {', '.join(map(repr, modules))} for {operation}"
        )
    if name in _EVERYWHERE:
        return None
    capability = compute_capability()
    if capability is None:  # said here, so that nobody without a GPU imports its kernels
        return f"{name} needs an NVIDIA GPU, and JAX's default device is {_default_device()}"
    check = getattr(_module(modules[name]), f"{operation}_unsupported_reason")
    return check(*args, **options, compute_capability=capability)


def pick(operation: str, name: str | None, *args: Any, **options: Any) -> str:
    """The implementation for a call: the named one, or the best that supports it.

    Args:
      operation: a key of `IMPLEMENTATIONS`.
      name: an implementation, or None.
      *args, **options: what the kernels' `<operation>_unsupported_reason` takes.

    Raises:
      ValueError: there is no implementation of that name.
      NotImplementedError: the named implementation cannot serve the call.
    """
    if name is not None:
        reason = unsupported_reason(operation, name, *args, **options)
        if reason is not None:
            raise NotImplementedError(f"implementation={name!r} cannot serve this call: {reason}")
        return name
    passed_over = []
    for candidate in IMPLEMENTATIONS[operation]:
        reason = unsupported_reason(operation, candidate, *args, **options)
        if reason is None:
            _log_choice(operation, candidate, "; ".join(passed_over))
            return candidate
        passed_over.append(f"{candidate}: {reason}")
    raise NotImplementedError(f"no implementation of {operation} serves this call: {passed_over}")


def kernel(operation: str, name: str) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of an implementation that has a module."""
    return getattr(_module(IMPLEMENTATIONS[operation][name]), operation)


def choose(
    operation: str, name: str | None, *args: Any, **options: Any
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel for a call; arguments and errors as for `pick`."""
    return kernel(operation, pick(operation, name, *args, **options))


def _default_device() -> Any:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def _module(name: str | None) -> Any:
    return importlib.import_module(f"paged_kv_jax.kernels.{name}")


@functools.cache
def _log_choice(operation: str, name: str, passed_over: str) -> None:
    logging.info("%s uses %s%s", operation, name, f" ({passed_over})" if passed_over else "")
