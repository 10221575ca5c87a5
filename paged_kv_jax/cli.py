"""`paged-kv`: text from a model through the paged cache, and what this machine would use for it."""

import argparse
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from absl import app, logging
from absl.flags import argparse_flags

from paged_kv_jax import attention, dispatch
from paged_kv_jax.config import KVCacheConfig
from paged_kv_jax.generation import Finish, Generated, blocks_needed, generate
from paged_kv_jax.plan import Plan, plan_from_tables
from paged_kv_jax.pool import KVPool
from paged_kv_jax.sampling import Sampling

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
    command.add_argument("prompts", nargs="+", metavar="PROMPT", help="text of a user's message")
    _add_model(command)
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    command.add_argument("--temperature", type=float, default=0.0, help="0, the default: greedy")
    command.add_argument("--top-k", type=int, default=None, metavar="K")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--raw", action="store_true", help="prompts as they are, no chat template")
    command.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens per block")
    command.add_argument(
        "--num-blocks", type=int, default=None, metavar="N",
        help="size of the pool; by default what these prompts can need at most",
    )  # fmt: skip

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


def _load(name: str) -> "LoadedModel":
    from paged_kv_jax.models import load_model

    return load_model(name)


def _generate(arguments: argparse.Namespace) -> int:
    """Run `paged-kv generate`; 1 where the pool was too small for every prompt to end by itself."""
    try:
        loaded = _load(arguments.model)
        sampling = Sampling(
            temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
        )
        prompts = [_encode(loaded, text, arguments.raw) for text in arguments.prompts]
        config = _cache_config(loaded, prompts, arguments)
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        print(f"paged-kv: {error}", file=sys.stderr)
        return 2
    printer = _Printer(arguments.prompts, [loaded.tokenizer.stream() for _ in prompts])
    generated = generate(
        loaded.model,
        prompts,
        config=config,
        max_new_tokens=arguments.max_new_tokens,
        stop_tokens=loaded.tokenizer.eos_ids,
        sampling=sampling,
        seed=arguments.seed,
        on_tokens=printer.push,
        on_finish=printer.finish,
    )
    _report(generated, prompts, config, arguments.max_new_tokens)
    starved = [i for i, finish in enumerate(generated.finish) if finish == Finish.OUT_OF_BLOCKS]
    if starved:
        names = ", ".join(str(index + 1) for index in starved)
        print(
            f"paged-kv: out of blocks: the pool of {config.num_blocks} blocks was too small, and "
            f"prompt {names} stopped early; --num-blocks {generated.blocks_needed} would do",
            file=sys.stderr,
        )
        return 1
    return 0


def _encode(loaded: "LoadedModel", text: str, is_raw: bool) -> list[int]:
    if is_raw or loaded.tokenizer.chat_template is None:
        tokens = loaded.tokenizer.encode(text)
    else:
        tokens = loaded.tokenizer.encode_chat([{"role": "user", "content": text}])
    if not tokens:
        raise ValueError(f"the prompt {text!r} has no tokens")
    return tokens


def _cache_config(
    loaded: "LoadedModel", prompts: list[list[int]], arguments: argparse.Namespace
) -> KVCacheConfig:
    new, block_size = arguments.max_new_tokens, arguments.block_size
    if new < 1:
        raise ValueError(f"--max-new-tokens={new} must be at least 1")
    if block_size < 1:
        raise ValueError(f"--block-size={block_size} must be a power of two")
    prompt_lens = [len(prompt) for prompt in prompts]
    longest = max(prompt_lens) + new
    if longest > loaded.config.max_position:
        raise ValueError(
            f"the longest prompt has {max(prompt_lens)} tokens; with --max-new-tokens={new} it would "
            f"pass the {loaded.config.max_position} positions of the model"
        )
    needed = blocks_needed(prompt_lens, new, block_size)
    return loaded.config.kv_cache_config(
        num_blocks=needed if arguments.num_blocks is None else arguments.num_blocks,
        max_seqs=len(prompts),
        max_blocks_per_seq=-(-longest // block_size),
        block_size=block_size,
        dtype=loaded.dtype,
    )


class _Printer:
    """Prints the prompts' texts in order: the first unfinished one as it comes, later ones then."""

    def __init__(self, prompts: list[str], streams: "list[TextStream]"):
        self._prompts = prompts
        self._streams = streams
        self._waiting = [""] * len(prompts)
        self._is_finished = [False] * len(prompts)
        self._current = 0
        self._print_head()

    def push(self, index: int, tokens: list[int]) -> None:
        self._add(index, self._streams[index].push(tokens))

    def finish(self, index: int) -> None:
        self._is_finished[index] = True
        self._add(index, self._streams[index].finish())

    def _add(self, index: int, text: str) -> None:
        self._waiting[index] += text
        while self._current < len(self._prompts):
            print(self._waiting[self._current], end="", flush=True)
            self._waiting[self._current] = ""
            if not self._is_finished[self._current]:
                return
            self._current += 1
            print("\n", flush=True)
            self._print_head()

    def _print_head(self) -> None:
        if self._current < len(self._prompts):
            first_line, *more = self._prompts[self._current].splitlines() or [""]
            shown = first_line if len(first_line) <= 76 and not more else f"{first_line[:75]}…"
            print(f"[{self._current + 1}] {shown}", flush=True)


def _report(
    generated: Generated, prompts: list[list[int]], config: KVCacheConfig, max_new_tokens: int
) -> None:
    """Print speed and memory."""
    timing, new = generated.timing, sum(map(len, generated.tokens))
    prompt_tokens, longest = sum(map(len, prompts)), max(map(len, prompts)) + max_new_tokens
    paged = generated.peak_blocks * config.block_size * config.bytes_per_token
    contiguous = len(prompts) * longest * config.bytes_per_token
    print(
        f"{prompt_tokens} prompt tokens in {timing.prefill:.2f} s, {new} new tokens in "
        f"{timing.decode:.2f} s: {new / max(timing.decode, 1e-9):.1f} tokens/s "
        f"(and {timing.compile:.1f} s to compile)\n"
        f"peak {generated.peak_blocks} of {config.num_blocks} blocks, {_mib(paged)}; contiguous "
        f"caches of {longest} tokens for {len(prompts)} prompts: {_mib(contiguous)} "
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
