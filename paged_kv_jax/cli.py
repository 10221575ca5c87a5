"""`paged-kv`: text from a model through the paged cache, how fast, and what this machine would use."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, logging
from absl.flags import argparse_flags

from paged_kv_jax import attention, dispatch
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.generation import blocks_needed
from paged_kv_jax.plan import Plan, plan_from_tables
from paged_kv_jax.pool import KVPool
from paged_kv_jax.sampling import Sampling
from paged_kv_jax.scheduler import ServingConfig, Status
from paged_kv_jax.server import Request, Server

if TYPE_CHECKING:
    from paged_kv_jax.models import LoadedModel
    from paged_kv_jax.models.tokenizer import TextStream


def main() -> None:
    """Entry point of the console script."""
    app.run(lambda arguments: sys.exit(arguments.run(arguments)), flags_parser=_parse)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse_flags.ArgumentParser(prog="paged-kv", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="log what is picked, and why")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="continue one or many prompts at once")
    command.set_defaults(run=_generate)
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="text of a user's message")
    command.add_argument(
        "--file", type=Path, default=None, metavar="PROMPTS.TXT",
        help="a prompt on each line that is not blank; shows a progress bar",
    )  # fmt: skip
    _add_model(command)
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    command.add_argument("--temperature", type=float, default=0.0, help="0, the default: greedy")
    command.add_argument("--top-k", type=int, default=None, metavar="K")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P")
    command.add_argument("--min-p", type=float, default=0.0, metavar="P")
    command.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    command.add_argument("--seed", type=int, default=0, help="prompt i draws with seed + i")
    command.add_argument("--raw", action="store_true", help="prompts as they are, no chat template")
    _add_pool(command)

    command = commands.add_parser("bench", help="how fast this machine serves random prompts")
    command.set_defaults(run=_bench)
    _add_model(command)
    command.add_argument("--requests", type=int, default=16, metavar="N")
    command.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    command.add_argument("--new-tokens", type=int, default=64, metavar="N")
    _add_pool(command)

    command = commands.add_parser("info", help="devices, implementations, how many tokens fit")
    command.set_defaults(run=_info)
    _add_model(command)
    command.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens per block")
    arguments = parser.parse_args(argv[1:])
    # Which implementation is picked, and the pool's size, are logged at INFO.
    logging.set_verbosity(logging.INFO if arguments.verbose else logging.WARNING)
    return arguments


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default="smollm2",
        help="smollm2 (fetched once, 93 MB), a .gguf file or a Hugging Face folder",
    )  # fmt: skip


def _add_pool(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--slots", type=int, default=32, metavar="S", help="prompts at once at most"
    )
    command.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens per block")
    command.add_argument(
        "--num-blocks", type=int, default=None, metavar="N",
        help="size of the pool; by default what the longest prompts in the slots can need",
    )  # fmt: skip


def _load(name: str) -> "LoadedModel":
    from paged_kv_jax.models import load_model

    return load_model(name)


def _generate(arguments: argparse.Namespace) -> int:
    """Run `paged-kv generate`; 1 where a prompt was refused, as no pool of this size could serve it."""
    try:
        texts = [*arguments.prompts, *_lines(arguments.file)]
        if not texts:
            raise ValueError("there is no prompt: give some, or --file with one a line")
        loaded = _load(arguments.model)
        sampling = Sampling(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
        )
        prompts = [_encode(loaded, text, arguments.raw) for text in texts]
        stop_tokens = tuple(loaded.tokenizer.eos_ids)
        requests = [
            Request(
                prompt=prompt, max_new_tokens=arguments.max_new_tokens, stop_tokens=stop_tokens,
                sampling=sampling, seed=arguments.seed + index,
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        config = _serving_config(loaded, prompts, arguments.max_new_tokens, arguments, stop_tokens)
    except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"paged-kv: {error}", file=sys.stderr)
        return 2
    streams = [loaded.tokenizer.stream() for _ in prompts]
    printer = _Printer(texts, streams, shows_progress=arguments.file is not None)
    server, compile_seconds = _started(loaded, config)
    refused = []
    start = time.perf_counter()
    for request in requests:
        server.add(request)
    for update in server.stream():
        printer.push(update.request, update.tokens)
        if update.finish is not None:
            printer.finish(update.request)
        if update.refusal is not None:
            refused.append((update.request, update.refusal))
    printer.close()
    seconds = time.perf_counter() - start
    _report(server, prompts, config, arguments.max_new_tokens, seconds, compile_seconds)
    for index, reason in refused:
        needed = blocks_needed(
            [len(prompts[index])], arguments.max_new_tokens, arguments.block_size
        )
        print(
            f"paged-kv: prompt {index + 1} was refused, {reason.name}: it can need {needed} blocks, "
            f"and the pool has {config.cache.num_blocks}; --num-blocks {needed} would do",
            file=sys.stderr,
        )
    return 1 if refused else 0


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _started(loaded: "LoadedModel", config: ServingConfig) -> tuple[Server, float]:
    """A server with all its programs compiled, and the seconds that took."""
    start = time.perf_counter()
    server = Server(loaded.model, config)
    server.warm_up()
    return server, time.perf_counter() - start


def _bench(arguments: argparse.Namespace) -> int:
    """Run `paged-kv bench`."""
    try:
        for name in ("requests", "prompt_tokens", "new_tokens"):
            if getattr(arguments, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}={getattr(arguments, name)} must be at least 1")
        loaded = _load(arguments.model)
        rng = np.random.default_rng(0)
        shape = arguments.requests, arguments.prompt_tokens
        prompts = rng.integers(0, loaded.config.vocab_size, shape).tolist()
        config = _serving_config(loaded, prompts, arguments.new_tokens, arguments, ())
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        print(f"paged-kv: {error}", file=sys.stderr)
        return 2
    server, compile_seconds = _started(loaded, config)
    start = time.perf_counter()
    for prompt in prompts:
        server.add(Request(prompt=prompt, max_new_tokens=arguments.new_tokens))
    results = server.run()
    seconds = time.perf_counter() - start
    refused = sum(result.finish is Status.REFUSED for result in results.values())
    if refused:
        print(
            f"paged-kv: {refused} requests can never fit into {config.cache.num_blocks} blocks",
            file=sys.stderr,
        )
        return 1
    print(f"{arguments.model} in {jnp.dtype(loaded.dtype).name} on {jax.devices()[0].device_kind}")
    _report(server, prompts, config, arguments.new_tokens, seconds, compile_seconds)
    totals = server.totals
    print(
        f"{totals.steps} steps, {totals.mixed_steps} of them with prompts: "
        f"{1e3 * seconds / totals.steps:.1f} ms each, {totals.computed_tokens / seconds:.1f} tokens/s "
        f"computed, {totals.preemptions} preemptions"
    )
    return 0


def _encode(loaded: "LoadedModel", text: str, is_raw: bool) -> list[int]:
    if is_raw or loaded.tokenizer.chat_template is None:
        tokens = loaded.tokenizer.encode(text)
    else:
        tokens = loaded.tokenizer.encode_chat([{"role": "user", "content": text}])
    if not tokens:
        raise ValueError(f"the prompt {text!r} has no tokens")
    return tokens


def _serving_config(
    loaded: "LoadedModel",
    prompts: Sequence[Sequence[int]],
    new: int,
    arguments: argparse.Namespace,
    stop_tokens: Sequence[int],
) -> ServingConfig:
    """Sizes that serve these prompts, `new` tokens each."""
    block_size = arguments.block_size
    if new < 1:
        raise ValueError(f"--max-new-tokens={new} must be at least 1")
    if block_size < 1:
        raise ValueError(f"--block-size={block_size} must be a power of two")
    if arguments.slots < 1:
        raise ValueError(f"--slots={arguments.slots} must be at least 1")
    prompt_lens = sorted(map(len, prompts))
    longest = prompt_lens[-1] + new
    if longest > loaded.config.max_position:
        raise ValueError(
            f"the longest prompt has {prompt_lens[-1]} tokens; with {new} new ones it would pass the "
            f"{loaded.config.max_position} positions of the model"
        )
    slots = min(arguments.slots, len(prompts))
    needed = blocks_needed(prompt_lens[-slots:], new, block_size)
    return ServingConfig(
        cache=loaded.config.kv_cache_config(
            num_blocks=needed if arguments.num_blocks is None else arguments.num_blocks,
            max_seqs=slots,
            max_blocks_per_seq=-(-longest // block_size),
            block_size=block_size,
            dtype=loaded.dtype,
        ),
        max_requests=min(len(prompts), 4 * slots),
        mixed_sizes=(max(slots, min(512, sum(prompt_lens))),),
        max_stop_tokens=max(1, len(stop_tokens)),
    )


class _Printer:
    """Prints the prompts' texts in order: the first unfinished one as it comes, later ones then.

    With `shows_progress`, a bar on the standard error counts what is finished, and texts are printed
    when they are complete.
    """

    def __init__(self, prompts: list[str], streams: "list[TextStream]", *, shows_progress: bool):
        from tqdm import tqdm

        self._streams = streams
        self._waiting = [_head(number, prompt) for number, prompt in enumerate(prompts, 1)]
        self._is_finished = [False] * len(prompts)
        self._current = self._num_tokens = 0
        self._shows_progress = shows_progress
        self._bar = tqdm(
            total=len(prompts), unit="prompt", disable=not shows_progress, file=sys.stderr
        )
        self._print()

    def push(self, index: int, tokens: list[int]) -> None:
        self._waiting[index] += self._streams[index].push(tokens)
        self._num_tokens += len(tokens)
        self._bar.set_postfix(new_tokens=self._num_tokens)
        self._print()

    def finish(self, index: int) -> None:
        self._waiting[index] += self._streams[index].finish() + "\n\n"
        self._is_finished[index] = True
        self._bar.update()
        self._print()

    def close(self) -> None:
        self._bar.close()

    def _print(self) -> None:
        while self._current < len(self._waiting):
            is_finished = self._is_finished[self._current]
            if self._shows_progress and not is_finished:
                return
            self._bar.write(self._waiting[self._current], file=sys.stdout, end="")
            sys.stdout.flush()
            self._waiting[self._current] = ""
            if not is_finished:
                return
            self._current += 1


def _head(number: int, prompt: str) -> str:
    first_line, *more = prompt.splitlines() or [""]
    shown = first_line if len(first_line) <= 76 and not more else f"{first_line[:75]}…"
    return f"[{number}] {shown}\n"


def _report(
    server: Server,
    prompts: Sequence[Sequence[int]],
    config: ServingConfig,
    max_new_tokens: int,
    seconds: float,
    compile_seconds: float,
) -> None:
    """Print speed and memory."""
    totals, cache = server.totals, config.cache
    prompt_tokens, longest = sum(map(len, prompts)), max(map(len, prompts)) + max_new_tokens
    paged = totals.peak_blocks * cache.block_size * cache.bytes_per_token
    contiguous = cache.max_seqs * longest * cache.bytes_per_token
    print(
        f"{prompt_tokens} prompt tokens and {totals.new_tokens} new tokens in {seconds:.2f} s: "
        f"{totals.new_tokens / max(seconds, 1e-9):.1f} new tokens/s "
        f"(and {compile_seconds:.1f} s to compile)\n"
        f"peak {totals.peak_blocks} of {cache.num_blocks} blocks, {_mib(paged)}; contiguous "
        f"caches of {longest} tokens for {cache.max_seqs} prompts: {_mib(contiguous)} "
        f"({contiguous / max(paged, 1):.1f}x)"
    )


def _info(arguments: argparse.Namespace) -> int:
    """Run `paged-kv info`."""
    try:
        loaded = _load(arguments.model)
        memory, source = _free_memory()
        config = KVCacheConfig.for_memory(
            memory,
            num_layers=loaded.config.num_layers,
            num_kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            block_size=arguments.block_size,
            max_seqs=1,
            max_blocks_per_seq=1,
            dtype=loaded.dtype,
        )
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        print(f"paged-kv: {error}", file=sys.stderr)
        return 2
    print(f"JAX {jax.__version__}, devices:")
    for device in jax.devices():
        print(f"  {device.id}: {device.platform} {device.device_kind}")
    for label, max_query_len in (("decode", 1), ("prefill", 512)):
        print(f"attention for {label} ({arguments.model}):")
        for line in _implementations(loaded, config, max_query_len):
            print(f"  {line}")
    print(
        f"{config.token_capacity:,} tokens fit ({config.num_blocks:,} blocks of {config.block_size}, "
        f"{config.bytes_per_token:,} bytes a token) into {_mib(memory)} {source}"
    )
    return 0


def _implementations(loaded: "LoadedModel", config: KVCacheConfig, max_query_len: int) -> list[str]:
    """One line per implementation: picked, would also do, or why not."""
    q = jax.ShapeDtypeStruct(
        (max_query_len, loaded.config.num_heads, config.head_dim), config.dtype
    )
    shape = (config.num_layers, 1, config.block_size, config.num_kv_heads, config.head_dim)
    pool = KVPool(*[jax.ShapeDtypeStruct(shape, config.dtype)] * 2)  # pyright: ignore[reportArgumentType]

    def make_plan() -> Plan:
        return plan_from_tables(
            jnp.zeros((1, 64), jnp.int32), jnp.ones(1, jnp.int32), max_query_len,
            block_size=config.block_size,
        )  # fmt: skip

    plan = jax.eval_shape(make_plan)
    lines, is_picked = [], False
    for name in dispatch.IMPLEMENTATIONS["paged_attention"]:
        is_supported, reason = attention.supports(
            name, q, pool, plan, sliding_window=loaded.config.sliding_window
        )
        if is_supported:
            verdict = "supported" if is_picked else "picked: the first that supports the call"
            is_picked = True
        else:
            verdict = f"not here: {reason}"
        lines.append(f"{name}: {verdict}")
    return lines


def _free_memory() -> tuple[int, str]:
    """Bytes a pool could take, and where they are."""
    device = jax.devices()[0]
    numbers = device.memory_stats()
    if numbers and "bytes_limit" in numbers:
        free = numbers["bytes_limit"] - numbers.get("bytes_in_use", 0)
        return free, "that JAX may still take on the first device"
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024, "of available host memory"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
