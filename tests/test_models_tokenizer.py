"""Tokenizers rebuilt from GGUF metadata, chat templates, and text that streams."""

import numpy as np
import pytest
import tokenizers

from paged_kv_jax.models.tokenizer import Tokenizer, tokenizer_from_gguf

SYMBOLS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TEXT = "Grüße 👩‍🚀, café — 12 日本語"


def metadata(**changes):
    """A vocabulary of single bytes, a merge, two control tokens and one user-defined token."""
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*SYMBOLS, "he", "<s>", "</s>", "<tool>"],
        "token_type": [1] * 257 + [3, 3, 4],
        "merges": ["h e"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.fixture
def tokenizer():
    return tokenizer_from_gguf(metadata())


def words(pre, text):
    """What the pre-tokenizer makes of `text`, as plain text."""
    decoder = tokenizers.decoders.ByteLevel()
    split = tokenizer_from_gguf(metadata(pre=pre)).backend.pre_tokenizer.pre_tokenize_str(text)
    return [decoder.decode([word]) for word, _ in split]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "€", "\n\n", " ok", " ", " X", "'", "S"]),
        (
            "smollm",
            ["I", "'ll", " pay", " ", *"12345", "€", "\n\n", " ok", " ", " X", "'", "S"],
        ),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "€\n\n", " ok", " ", " X", "'S"]),
        ("qwen2", ["I", "'ll", " pay", " ", *"12345", "€\n\n", " ok", " ", " X", "'S"]),
    ],
)
def test_words_end_where_the_models_tokenizer_ends_them(pre, expected):
    assert words(pre, "I'll pay 12345€\n\n ok  X'S") == expected


def test_tokens_of_a_gguf_vocabulary(tokenizer):
    ids = tokenizer.encode("<s>hehh<tool></s>")
    h = SYMBOLS.index("h")
    assert ids == [257, 256, h, h, 259, 258]
    assert tokenizer.decode(ids) == "hehh<tool>"  # a user-defined token is text, control is not
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hehh<tool></s>"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab_size == 260


def test_end_tokens_and_bos_follow_the_metadata():
    assert tokenizer_from_gguf(metadata()).eos_ids == (258,)
    assert tokenizer_from_gguf(metadata(eot_token_id=257)).eos_ids == (257, 258)
    with_bos = tokenizer_from_gguf(metadata(add_bos_token=True))
    assert with_bos.encode("he") == [257, 256]
    assert with_bos.encode("he", add_special_tokens=False) == [256]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model="llama"), "tokenizer.ggml.model='llama' is not supported in a GGUF file"),
        (dict(pre="martian"), "tokenizer.ggml.pre='martian' is not known"),
    ],
)
def test_tokenizer_that_cannot_be_rebuilt_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(metadata(**change))


def test_qwen2_text_is_normalised():
    tokenizer = tokenizer_from_gguf(metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_stream_never_shows_half_a_character(tokenizer, chunk):
    ids = np.array(tokenizer.encode(TEXT))  # a token per byte: most characters take several
    stream = tokenizer.stream()
    pieces = [stream.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT
    assert stream.finish() == ""


def test_stream_shows_a_character_with_its_last_byte(tokenizer):
    stream = tokenizer.stream()
    rocket = tokenizer.encode("🚀")
    assert [stream.push([token]) for token in rocket] == ["", "", "", "🚀"]


def test_stream_gives_up_on_a_broken_character_at_the_end_only(tokenizer):
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("ok🚀")[:-1]) == ""
    assert stream.finish() == "ok\ufffd"
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("🚀")[:2]) == ""
    assert stream.push(tokenizer.encode("a")) == "\ufffda"  # it can no longer be completed


def test_stream_joins_to_the_decoded_text_whatever_the_tokens(tokenizer):
    rng = np.random.default_rng(0)
    choice = tokenizer.encode("aé日🚀\ufffd") + [257, 258, 259]  # loose bytes and added tokens
    for _ in range(200):
        ids = rng.choice(choice, size=rng.integers(1, 14))
        cuts = np.sort(rng.integers(0, len(ids) + 1, 3))
        stream = tokenizer.stream()
        text = "".join(stream.push(part) for part in np.split(ids, cuts)) + stream.finish()
        assert text == tokenizer.decode(ids)


def chat_tokenizer(template):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return Tokenizer(backend, eos_ids=[], bos_token="<s>", eos_token="</s>", chat_template=template)


def test_chat_template_sees_messages_and_special_tokens():
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.role }}: {{ m.content }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [dict(role=role, content=role.upper()) for role in ("user", "skip", "system")]
    tokenizer = chat_tokenizer(template)
    expected = "<s>user: USER</s>\nsystem: SYSTEM</s>\n"  # lines of blocks alone leave nothing
    assert tokenizer.render_chat(messages) == expected + "assistant:"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('system must be first') }}", "system must be first"),
        ("{{ messages.__class__.__mro__ }}", "refused"),  # templates are not trusted
        (None, "no chat template"),
    ],
)
def test_chat_that_cannot_be_rendered_is_an_error(template, message):
    with pytest.raises(ValueError, match=message):
        chat_tokenizer(template).render_chat([])
