"""What users install: one version, the kernels inside, no dependency but JAX's, nothing heavy on import."""

import importlib.metadata
import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

import paged_kv_jax as pkv

ROOT = pathlib.Path(__file__).parent.parent
RUNTIME_DEPENDENCIES = {"jax", "jaxlib", "chex", "absl-py"}


def python(code: str, cwd: pathlib.Path = ROOT, path: str = str(ROOT)) -> str:
    """Standard output of `code` in a fresh interpreter; fails with its traceback."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd, env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_in_one_place():
    text = (ROOT / "paged_kv_jax" / "_version.py").read_text()
    assert f'__version__ = "{pkv.__version__}"' in text
    assert "version" not in project()["project"]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "paged_kv_jax._version.__version__"
    }


def test_the_installed_version_is_this_one():
    try:
        installed = importlib.metadata.version("paged_kv_jax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("paged_kv_jax runs from the source tree and is not installed")
    assert installed == pkv.__version__


def test_the_runtime_dependencies_are_four():
    names = {entry.split(">")[0].split("=")[0] for entry in project()["project"]["dependencies"]}
    assert names == RUNTIME_DEPENDENCIES


def test_everything_public_is_there_and_documented():
    for name in pkv.__all__:
        assert getattr(pkv, name).__doc__, f"{name} has no docstring"


def test_kernels_refuse_to_be_imported_as_a_bare_module():
    message = python("try:\n    import kernels\nexcept ImportError as error:\n    print(error)")
    assert "paged_kv_jax.kernels" in message
    assert "bare" in message


def test_importing_the_package_loads_no_kernel_and_nothing_optional():
    loaded = python("import sys, paged_kv_jax; print('\\n'.join(sys.modules))").split()
    assert "paged_kv_jax.allocator" in loaded
    heavy = [
        name
        for name in loaded
        if name.startswith(("jax.experimental.pallas", "jax.experimental.mosaic"))
        or name.startswith("paged_kv_jax.kernels.")
        or name.split(".")[0] in ("flax", "torch", "tokenizers", "matplotlib", "gguf", "tqdm")
    ]
    assert heavy == []


def test_the_core_works_without_any_optional_package():
    """A decode step on the CPU with every import but those of the runtime dependencies blocked."""
    python("""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "torch", "gguf", "safetensors", "tokenizers", "jinja2",
                                  "tqdm", "matplotlib", "transformers", "hypothesis", "pytest"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import jax.numpy as jnp
import paged_kv_jax as pkv
cache = pkv.PagedKVCache.create(pkv.KVCacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=4, max_seqs=1, max_blocks_per_seq=4))
ids = jnp.zeros(1, jnp.int32)
cache, result = cache.allocate(ids, 1)
cache, plan, result = cache.step(ids)
one = jnp.ones((1, 1, 8), jnp.bfloat16)
cache = cache.write(0, one, one, plan)
assert cache.attend(one, 0, plan).shape == (1, 1, 8)
pkv.raise_if_failed(cache)
""")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel of the working tree, built outside of it."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools >= 77 to build a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    build = """
import sys, setuptools.build_meta as backend
backend.build_wheel(sys.argv[1])
"""
    source = folder / "source"
    source.mkdir()
    for name in ("paged_kv_jax", "kernels", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_its_kernels_and_its_types(wheel: pathlib.Path):
    assert wheel.name.startswith(f"paged_kv_jax-{pkv.__version__}-py3-none-any")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"paged_kv_jax/kernels/{file.name}" for file in (ROOT / "kernels").glob("*.py")} | {
        f"paged_kv_jax/{file.name}" for file in (ROOT / "paged_kv_jax").glob("*.py")
    }
    assert expected <= names
    assert "paged_kv_jax/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"paged_kv_jax", f"paged_kv_jax-{pkv.__version__}.dist-info"}


def test_what_the_wheel_installs_runs_outside_the_repository(
    wheel: pathlib.Path, tmp_path: pathlib.Path
):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    where = python(
        "import paged_kv_jax.kernels.attention_xla as module; print(module.__file__)",
        cwd=tmp_path, path=str(tmp_path / "site"),
    )  # fmt: skip
    assert where.startswith(str(tmp_path / "site"))
