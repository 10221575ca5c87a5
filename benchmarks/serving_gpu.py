"""Continuous batching of a model with the shape of Llama-3.1-8B and random bfloat16 weights, on one GPU.

    python benchmarks/serving_gpu.py [--transformers]   # writes results/serving_gpu.{md,json}
    python benchmarks/serving_gpu.py --tiny             # a small model and few requests, also on a CPU

All requests are there from the start and all fit into slots and pool at once. First their prompts are
computed, in chunks among the decoding rows of those that are done (`prefill`); then calls of the compiled
program, a few decode steps each, are timed one by one while every request runs (`decode`); then the rest.

The floor of a decode step is the time to read the weights (all but the embedding table) and the keys and
values of all live tokens once, at the rate of a kernel that only reads, measured in the same run. On a
CPU there is no such kernel, and no floor is given.

`--transformers` has the transformers package's own continuous batching (`generate_batch`) answer the same
requests with weights of the same shape, before and in a process of its own.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import sys
import time

# The pool and the weights are most of a GPU's memory; to be said before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import paged_kv_jax as pkv
from paged_kv_jax.models.llama import DecoderLayer, Llama, LlamaConfig, rotary_angles
from paged_kv_jax.plan import Plan
from paged_kv_jax.scheduler import ServingConfig
from paged_kv_jax.server import Request, Server

RESULTS = pathlib.Path(__file__).parent / "results"
BLOCK_SIZE = 16


def model_config(arguments: argparse.Namespace) -> LlamaConfig:
    """Llama-3.1-8B's shape, or a tiny one."""
    if arguments.tiny:
        return LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=arguments.layers,
            num_heads=4, num_kv_heads=2, head_dim=16, max_position=8192, rope_theta=500000.0,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=arguments.layers,
        num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072, rope_theta=500000.0,
    )  # fmt: skip


class FastCompiling(nnx.Module):
    """The same model, traced and lowered once for all layers: each layer is a call of one function.

    XLA inlines the calls, so that the program is that of the unrolled loop.
    """

    def __init__(self, model: Llama):
        self.model = model

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, pool: pkv.KVPool, plan: Plan
    ) -> tuple[jax.Array, pkv.KVPool]:
        """As `Llama.__call__`."""
        model = self.model
        angles = rotary_angles(model.config, positions)
        hidden = model.embed_tokens(tokens)
        for index, layer in enumerate(model.layers):
            hidden, pool = _through_layer(layer, jnp.int32(index), hidden, angles, pool, plan)
        return model.norm(hidden), pool

    def logits(self, hidden: jax.Array) -> jax.Array:
        """As `Llama.logits`."""
        return self.model.logits(hidden)


@jax.jit
def _through_layer(
    layer: DecoderLayer,
    index: jax.Array,
    hidden: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    pool: pkv.KVPool,
    plan: Plan,
) -> tuple[jax.Array, pkv.KVPool]:
    q, k, v = layer.qkv(hidden, *angles)
    pool = pkv.write(pool, index, k, v, plan)
    attended = pkv.paged_attention(q, pool, index, plan)
    return layer.finish(hidden, attended), pool


def prompts_of(arguments: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Random tokens, lengths spread evenly over the range, in random order."""
    rng = np.random.default_rng(0)
    low, high = arguments.prompt_lens
    lens = rng.permutation(np.linspace(low, high, arguments.requests).round().astype(int))
    return [rng.integers(0, vocab_size, length).tolist() for length in lens]


def serve(arguments: argparse.Namespace, read_rate: float | None) -> dict:
    """Serve all requests and time it; `read_rate` in bytes a second."""
    config, new = model_config(arguments), arguments.new_tokens
    prompts = prompts_of(arguments, config.vocab_size)
    begin = time.perf_counter()
    dtype = jnp.bfloat16
    model = FastCompiling(Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    jax.block_until_ready(nnx.state(model))
    made = time.perf_counter()
    serving = ServingConfig(
        cache=config.kv_cache_config(
            num_blocks=sum(-(-(len(prompt) + new - 1) // BLOCK_SIZE) for prompt in prompts),
            block_size=BLOCK_SIZE, max_seqs=len(prompts),
            max_blocks_per_seq=-(-(arguments.prompt_lens[1] + new) // BLOCK_SIZE), dtype=dtype,
        ),
        max_requests=len(prompts), mixed_sizes=(arguments.step_tokens,),
        max_admissions=min(32, len(prompts)),
    )  # fmt: skip
    server = Server(model, serving, steps_per_call=arguments.steps_per_call)
    server.warm_up()
    compiled = time.perf_counter()
    print(f"weights: {made - begin:.1f} s, compiled: {compiled - made:.1f} s", flush=True)

    for prompt in prompts:
        server.add(Request(prompt=prompt, max_new_tokens=new))
    started = set()
    start = time.perf_counter()
    while len(started) < len(prompts):
        for update in server.step():
            started.add(update.request)
            if update.finish is not None:
                raise RuntimeError(
                    "a request ended before all prompts were computed: fewer, please"
                )
    prefill_seconds = time.perf_counter() - start
    prefill = server.totals
    print(f"prefill: {prefill_seconds:.1f} s", flush=True)

    step_ms, live_tokens, ended = [], [], False
    while not ended:
        before, num_steps = time.perf_counter(), server.totals.steps
        lens = np.asarray(server.scheduler.requests.lens)
        updates = server.step()
        num_steps = server.totals.steps - num_steps
        ended = any(update.finish is not None for update in updates)
        if not ended:
            step_ms.append(1e3 * (time.perf_counter() - before) / num_steps)
            live_tokens.append(int(lens.sum()) + len(prompts) * (num_steps - 1) // 2)
    server.run()
    seconds = time.perf_counter() - start
    pkv.raise_if_failed(server.scheduler)
    if int(server.scheduler.cache.state.free_top) != serving.cache.num_blocks:
        raise RuntimeError("not all blocks are free at the end")
    if not step_ms:
        raise RuntimeError("no call in which every request decoded: more --new-tokens, please")

    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    weights -= model.model.embed_tokens.weight[...].nbytes
    read_ms = 1e3 / read_rate if read_rate else float("nan")  # of a byte
    floors = [
        read_ms * (weights + tokens * serving.cache.bytes_per_token) for tokens in live_tokens
    ]
    over_floor = [ms / floor for ms, floor in zip(step_ms, floors, strict=True)]
    prompt_tokens, new_tokens = sum(map(len, prompts)), new * len(prompts)
    decoded = prefill.computed_tokens - prompt_tokens
    return {
        "requests": len(prompts),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_second": new_tokens / seconds,
        "prefill_seconds": prefill_seconds,
        "prefill_tokens_per_second": prompt_tokens / prefill_seconds,
        "tokens_decoded_among_prefill": decoded,
        "decode_step_ms": statistics.median(step_ms),
        "decode_floor_ms": statistics.median(floors) if read_rate else None,
        "decode_over_floor": statistics.median(over_floor) if read_rate else None,
        "decode_calls": len(step_ms),
        "live_tokens": statistics.median(live_tokens),
        "weight_bytes": weights,
        "kv_bytes_per_token": serving.cache.bytes_per_token,
        "weights_seconds": made - begin,
        "compile_seconds": compiled - made,
        "steps": server.totals.steps,
        "preemptions": server.totals.preemptions,
    }


def serve_with_transformers(arguments: argparse.Namespace, queue: multiprocessing.Queue) -> None:
    """The same requests through transformers; puts the seconds and the tokens it made on the queue."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config, new = model_config(arguments), arguments.new_tokens
    has_flash = importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position,
        rope_theta=config.rope_theta, attn_implementation=attention,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(shape).eval()
    options = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = prompts_of(arguments, config.vocab_size)
    with torch.inference_mode():
        model.generate_batch(prompts[:8], generation_config=options, progress_bar=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=options, progress_bar=False)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    made = sum(len(output.generated_tokens) for output in outputs.values())
    queue.put(
        {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "attention": attention,
            "seconds": seconds,
            "new_tokens": made,
            "tokens_per_second": made / seconds,
        }
    )


def transformers_result(arguments: argparse.Namespace) -> dict:
    """What `serve_with_transformers` found, from a process whose GPU memory is free again afterwards."""
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        return {"missing": f"{' and '.join(missing)} cannot be imported here"}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=serve_with_transformers, args=(arguments, queue))
    process.start()
    while process.is_alive() and queue.empty():
        time.sleep(0.2)
    result = {"missing": "it failed, see above"} if queue.empty() else queue.get()
    process.join()
    return result


def read_ceiling() -> float | None:
    """Bytes a second that a kernel reads which does nothing else; None without an NVIDIA GPU."""
    if jax.devices()[0].platform != "gpu":
        return None
    import measure

    return 1e12 * measure.ceilings()["read"]


def environment() -> dict[str, str]:
    """What a result must name."""
    if jax.devices()[0].platform == "gpu":
        import measure

        return {**measure.environment(), "python": platform.python_version()}
    return {
        "gpu": f"none: {jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def markdown(record: dict) -> str:
    """The record for people."""
    where, ours, size = record["environment"], record["server"], record["size"]
    shape = "a tiny model" if size["tiny"] else "Llama-3.1-8B"
    lines = [
        f"# Continuous batching, {size['layers']} layers of {shape}, random bfloat16 weights",
        "",
        ", ".join(f"{key}: {value}" for key, value in where.items()),
        "",
        f"{ours['requests']} requests, {ours['prompt_tokens']:,} prompt tokens "
        f"({size['prompt_lens'][0]} to {size['prompt_lens'][1]} each), {size['new_tokens']} new tokens "
        f"each; {size['step_tokens']} tokens in a step at most.",
        "",
        "| what | |",
        "|---|---|",
        f"| new tokens per second, prefill included | {ours['tokens_per_second']:,.0f} |",
        f"| prompt tokens per second, in {ours['prefill_seconds']:.1f} s of prefill "
        f"| {ours['prefill_tokens_per_second']:,.0f} |",
        f"| decode step of {ours['requests']} rows over {ours['live_tokens']:,.0f} live tokens, median of "
        f"{ours['decode_calls']} calls | {ours['decode_step_ms']:.2f} ms |",
    ]
    if ours["decode_floor_ms"] is not None:
        lines += [
            f"| its floor: {ours['weight_bytes'] / 1e9:.2f} GB of weights and "
            f"{ours['live_tokens'] * ours['kv_bytes_per_token'] / 1e9:.1f} GB of keys and values at "
            f"{record['read_ceiling'] / 1e12:.2f} TB/s | {ours['decode_floor_ms']:.2f} ms |",
            f"| step over floor | {ours['decode_over_floor']:.3f} |",
        ]
    peer = record["transformers"]
    if peer is not None:
        told = (
            peer["missing"]
            if "missing" in peer
            else f"{peer['tokens_per_second']:,.0f} ({peer['version']}, {peer['attention']})"
        )
        lines.append(f"| transformers' `generate_batch`, new tokens per second | {told} |")
    lines.append(
        f"| weights made, programs compiled | {ours['weights_seconds']:.0f} s, "
        f"{ours['compile_seconds']:.0f} s |"
    )
    return "\n".join(lines)


def main() -> None:
    """Run, print and keep the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    integer = functools.partial(parser.add_argument, type=int)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a few short requests")
    integer("--layers", help="32; fewer take less time and memory")
    integer("--requests", help="256")
    integer("--prompt-lens", nargs=2, metavar=("LOW", "HIGH"), help="512 4096")
    integer("--new-tokens", help="256")
    integer("--step-tokens", help="8192: tokens that one step computes at most")
    integer("--steps-per-call", default=16)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    usual = dict(layers=32, requests=256, prompt_lens=[512, 4096], new_tokens=256, step_tokens=8192)
    tiny = dict(layers=2, requests=12, prompt_lens=[8, 64], new_tokens=48, step_tokens=128)
    for name, value in (tiny if arguments.tiny else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

    peer = transformers_result(arguments) if arguments.transformers else None
    rate = read_ceiling()
    record = {
        "environment": environment(),
        "size": {
            name: getattr(arguments, name)
            for name in ("tiny", "layers", "prompt_lens", "new_tokens", "step_tokens")
        },
        "read_ceiling": rate,
        "server": serve(arguments, rate),
        "transformers": peer,
    }
    text = markdown(record)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "serving_gpu.md").write_text(text + "\n")
    (arguments.out / "serving_gpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
