"""Loads a Hugging Face folder: config.json, safetensors weights, tokenizer.json, chat template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tokenizers

from paged_kv_jax.models.llama import Llama, LlamaConfig, from_weights, llama3_rope_factors
from paged_kv_jax.models.tokenizer import Tokenizer

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def load_model_folder(folder: str | Path, dtype: Any) -> Llama:
    """The model in a folder with config.json and *.safetensors, sharded or not.

    Args:
      folder: the folder.
      dtype: the weights are cast to it.

    Raises:
      ValueError: the architecture or a tensor is not supported.
      FileNotFoundError: a file is missing.
    """
    folder = Path(folder)
    config = config_from_json(_read_json(folder / "config.json"))
    return from_weights(config, _weights(folder, config), dtype)


def load_tokenizer_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer in a folder with tokenizer.json and, if present, its settings and template."""
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; only tokenizers of that format are supported")
    backend = tokenizers.Tokenizer.from_file(str(file))
    settings = _read_json(folder / "tokenizer_config.json", default={})
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_ids = {backend.token_to_id(eos)} if eos else set()
    for name in ("config.json", "generation_config.json"):
        ids = _read_json(folder / name, default={}).get("eos_token_id")
        eos_ids |= set(ids) if isinstance(ids, list) else {ids}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        eos_ids=[token for token in eos_ids if token is not None],
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
    )


def config_from_json(settings: dict[str, Any]) -> LlamaConfig:
    """The architecture that a config.json describes.

    Raises:
      ValueError: a setting is not supported; the message names it and its value.
    """
    kind = settings.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ValueError(f"model_type={kind!r} must be one of {_MODEL_TYPES}")
    for name, supported in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("attention_bias", False),
        ("quantization_config", None),
    ):
        if settings.get(name, supported) != supported:
            raise ValueError(f"{name}={settings[name]!r} is not supported; only {supported!r} is")
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    # Transformers gives Qwen3 a head dimension of its own when config.json leaves it out.
    head_dim = settings.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    # Older files keep rope_theta and rope_scaling apart, newer ones have both in rope_parameters.
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope_theta = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    return LlamaConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=hidden,
        intermediate_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=settings["max_position_embeddings"],
        rope_theta=rope_theta,
        rope_factors=_rope_factors(rope, head_dim, rope_theta),
        norm_eps=float(settings["rms_norm_eps"]),
        tie_embeddings=settings.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(settings),
    )


def _rope_factors(rope: dict[str, Any], head_dim: int, rope_theta: float) -> tuple[float, ...]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return ()
        case "linear":
            return (float(rope["factor"]),) * (head_dim // 2)
        case "llama3":
            return llama3_rope_factors(
                head_dim,
                rope_theta,
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_position=rope["original_max_position_embeddings"],
            )
    raise ValueError(f"rope_type={kind!r} must be one of default, linear, llama3")


def _sliding_window(settings: dict[str, Any]) -> int | None:
    window = settings.get("sliding_window")
    if settings["model_type"] in ("qwen2", "qwen3") and not settings.get("use_sliding_window"):
        window = None  # there, sliding_window counts only when it is switched on
    layers = set(settings.get("layer_types") or ())
    if window is not None and "full_attention" in layers:
        raise ValueError(
            f"sliding_window={window} with layer_types of full_attention among them is not "
            "supported: all layers must have the same window"
        )
    return window


def _weights(folder: Path, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(parameter path, array) of every tensor in the folder's weight files."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        files = sorted({folder / name for name in _read_json(index)["weight_map"].values()})
    elif single.is_file():
        files = [single]
    else:
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    for file in files:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            names = tensors.keys()
            for name in names:
                if name.endswith("rotary_emb.inv_freq"):  # follows from the config
                    continue
                if name == "lm_head.weight" and config.tie_embeddings:  # a second copy of the table
                    continue
                yield name.removeprefix("model."), tensors.get_tensor(name)


def _token_text(token: str | dict[str, Any] | None) -> str:
    """A special token of tokenizer_config.json, which writes it as text or as a record."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    return json.loads(path.read_text(encoding="utf-8"))
