"""Text to token ids and back: byte-level BPE, chat templates, and detokenisation as tokens stream."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

Message = Mapping[str, Any]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character (yet)
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched before BPE sees the text

# Words end where these say, per `tokenizer.ggml.pre`; {digits} is how many digits make one word.
_TIKTOKEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer, its end tokens and its chat template.

    Attributes:
      eos_ids: tokens that end a generation.
      chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.chat_template = chat_template
        self._template_tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts BOS in front where the model wants it."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that make no character become U+FFFD."""
        ids = [int(token) for token in ids]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation.

        Args:
          messages: each with "role" ("system", "user", "assistant") and "content".
          add_generation_prompt: end with the header of the assistant's next turn.

        Raises:
          ValueError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template; encode plain text instead")
        try:
            return _compile_template(self.chat_template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._template_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; see `render_chat`, which writes BOS itself if it is due."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def stream(self) -> "TextStream":
        """A fresh incremental detokeniser for one sequence."""
        return TextStream(self)


class TextStream:
    """Turns one sequence's tokens into text as they come, whole characters only.

    The pieces returned by `push` and `finish`, joined, are `decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Tokens of the last piece stay as context: some decoders treat a sequence's start apart.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; an unfinished character waits for its other bytes."""
        self._pending.extend(ids)
        text = self._pending_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """The rest; bytes that never became a character come out as U+FFFD."""
        text = self._pending_text()
        self._context, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def _compile_template(source: str) -> jinja2.Template:
    """Compiles a chat template in a sandbox, with the helpers that such templates expect."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_TIKTOKEN_WORDS.replace("{digits}", digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2" | "default":
            return gpt2
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case "llama-bpe":
            return _split_words("{1,3}")
        case "qwen2":
            return _split_words("")
    raise ValueError(
        f"tokenizer.ggml.pre={name!r} is not known; gpt-2, default, smollm, llama-bpe and qwen2 are"
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer that a GGUF file describes.

    Args:
      metadata: the file's "tokenizer.*" keys with Python values.

    Raises:
      ValueError: the file's kind of tokenizer is not byte-level BPE, or its splitting is unknown.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = get("model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported in a GGUF file: only byte-level BPE "
            "('gpt2') is. Load the model's Hugging Face folder, whose tokenizer.json has it, instead"
        )
    tokens, types = get("tokens"), get("token_type")
    pre = get("pre", "default")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in get("merges")],
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([_added(token) for token, kind in typed if kind == _CONTROL])
    backend.add_tokens([_added(token) for token, kind in typed if kind == _USER_DEFINED])

    bos, eos = get("bos_token_id"), get("eos_token_id")
    if get("add_bos_token", pre == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            special_tokens=[(tokens[bos], bos)],
        )
    return Tokenizer(
        backend,
        eos_ids=[token for token in (eos, get("eot_token_id")) if token is not None],
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False)
