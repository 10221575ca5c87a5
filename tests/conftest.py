"""Strict numerics for every test, and the GPU tests skipped in plain sight where there is no GPU."""

import jax
import pytest

# No silent mixing of dtypes, such as int32 positions with float32 logits.
jax.config.update("jax_numpy_dtype_promotion", "strict")
if jax.default_backend() == "cpu":
    # Tests compile far more than they compute: less work of LLVM's is a third less time.
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    no_gpu = pytest.mark.skip(
        reason=f"needs an NVIDIA GPU; JAX sees {jax.devices()[0].platform} only"
    )
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
