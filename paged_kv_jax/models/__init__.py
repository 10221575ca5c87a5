"""Models that run on the paged cache. Needs the extra: pip install "paged_kv_jax[models]"."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from paged_kv_jax.models.llama import Llama, LlamaConfig
    from paged_kv_jax.models.tokenizer import Tokenizer

__all__ = ["LoadedModel", "load_model"]

_EXTRA = ("flax", "gguf", "jinja2", "safetensors", "tokenizers", "tqdm")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, its architecture and its tokenizer."""

    model: "Llama"
    config: "LlamaConfig"
    tokenizer: "Tokenizer"

    @property
    def dtype(self) -> Any:
        """Element type of the weights and activations."""
        return self.model.embed_tokens.weight[...].dtype


def load_model(name_or_path: str | Path, dtype: Any = None) -> LoadedModel:
    """Loads a Llama-architecture model.

    Args:
      name_or_path: "smollm2" (fetched once, 93 MB), a .gguf file, or a Hugging Face folder with
        config.json, *.safetensors and tokenizer.json.
      dtype: of the weights and activations; None takes float32 on the CPU, bfloat16 elsewhere.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: the model is of a kind that is not supported; the message says what is.
      ModuleNotFoundError: the extra is not installed.
    """
    try:
        from paged_kv_jax.models.gguf import load_gguf
        from paged_kv_jax.models.huggingface import load_model_folder, load_tokenizer_folder
        from paged_kv_jax.models.smollm2 import smollm2_path
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f'{error.name} is missing: pip install "paged_kv_jax[models]"', name=error.name
        ) from error

    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    path = smollm2_path() if name_or_path == "smollm2" else Path(name_or_path)
    if path.is_dir():
        model, tokenizer = load_model_folder(path, dtype), load_tokenizer_folder(path)
    elif path.is_file() and path.suffix == ".gguf":
        model, tokenizer = load_gguf(path, dtype)
    else:
        raise FileNotFoundError(
            f"name_or_path={str(name_or_path)!r} must be smollm2, a .gguf file or a folder"
        )
    return LoadedModel(model=model, config=model.config, tokenizer=tokenizer)
