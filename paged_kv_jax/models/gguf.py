"""Loads a GGUF file: architecture and tokenizer from its metadata, weights dequantised."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged_kv_jax.models.llama import Llama, LlamaConfig, from_weights
from paged_kv_jax.models.tokenizer import Tokenizer, tokenizer_from_gguf

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: str | Path, dtype: Any) -> tuple[Llama, Tokenizer]:
    """The model and the tokenizer in a .gguf file.

    Args:
      path: of the file.
      dtype: the weights are dequantised and cast to it.

    Raises:
      ValueError: the file holds an architecture, a tokenizer or a tensor that is not supported.
    """
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = config_from_metadata(
        metadata,
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        rope_factors=tuple(tensors[_ROPE_FACTORS].data.tolist())
        if _ROPE_FACTORS in tensors
        else (),
    )
    interleaved = metadata["general.architecture"] == "llama"
    weights = _weights(reader, config, interleaved=interleaved)
    return from_weights(config, weights, dtype), tokenizer_from_gguf(metadata)


def config_from_metadata(
    metadata: dict[str, Any],
    *,
    tie_embeddings: bool,
    qkv_bias: bool,
    rope_factors: tuple[float, ...],
) -> LlamaConfig:
    """The architecture that a file's metadata describes.

    Args:
      metadata: the file's keys with Python values.
      tie_embeddings: the file has no output projection.
      qkv_bias: the file has biases of q, k and v.
      rope_factors: the file's divisors of the rotary frequencies; () for none.
    """
    arch = metadata["general.architecture"]
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"general.architecture={arch!r} must be one of llama, qwen2, qwen3")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ValueError(f"the GGUF file has no {arch}.{key}")
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{arch}.attention.value_length must equal key_length={head_dim}")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{arch}.rope.dimension_count={get('rope.dimension_count')} must equal the head "
            f"dimension {head_dim}: RoPE over a part of the head is not supported"
        )
    if get("expert_count", 0):
        raise ValueError(f"{arch}.expert_count={get('expert_count')}: experts are not supported")
    scaling = get("rope.scaling.type", "none")
    if scaling == "linear":
        rope_factors = (float(get("rope.scaling.factor")),) * (head_dim // 2)
    elif scaling != "none":
        raise ValueError(f"{arch}.rope.scaling.type={scaling!r} must be none or linear")
    return LlamaConfig(
        vocab_size=metadata.get(f"{arch}.vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=get("context_length"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_factors=rope_factors,
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings=tie_embeddings,
        qkv_bias=qkv_bias,
        qk_norm=arch == "qwen3",
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
    )


def _weights(
    reader: gguf.GGUFReader, config: LlamaConfig, *, interleaved: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """(parameter path, float32 array) of every tensor.

    Files of the llama architecture are `interleaved`: RoPE's pairs lie side by side in the rows of
    q and k there, while `apply_rotary` pairs row i of a head with row i + D // 2.
    """
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or match["name"] not in _NAMES:
            raise ValueError(f"tensor {tensor.name!r} has no place in a Llama-architecture model")
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if interleaved and match["name"] in ("attn_q", "attn_k"):
            pairs = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        layer = "" if match["layer"] is None else f"layers.{match['layer']}."
        yield f"{layer}{_NAMES[match['name']]}.{match['kind']}", array
