"""No pool-sized copy or temporary in a compiled decode loop, read from the compiled program."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import paged_kv_jax as pkv

L, N, P, K, H, D, S = 3, 4096, 16, 2, 4, 32, 4
LAYER_ELEMENTS = N * P * K * D

# XLA of JAX 0.10 has no bfloat16 scatter or gather on the CPU: it widens the whole pool, every time.
no_bfloat16_on_cpu = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11) and jax.default_backend() == "cpu",
    reason="JAX 0.10's XLA widens whole bfloat16 pools on the CPU",
)
each_dtype = pytest.mark.parametrize(
    "dtype", ["float32", "float16", pytest.param("bfloat16", marks=no_bfloat16_on_cpu)]
)


def config(dtype: str = "float32", max_blocks_per_seq: int = 8) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=L, num_kv_heads=K, head_dim=D, num_blocks=N, block_size=P, max_seqs=S,
        max_blocks_per_seq=max_blocks_per_seq, dtype=dtype,
    )  # fmt: skip


def decode_step(layers: str):
    """One step of S sequences through L layers: append, plan, and per layer write and attend."""
    seq_ids = jnp.arange(S, dtype=jnp.int32)

    def through_layer(x, pool, layer, plan):
        heads = x.reshape(S, H, D)
        pool = pkv.write(pool, layer, heads[:, :K], heads[:, K:], plan)
        return x + pkv.paged_attention(heads, pool, layer, plan).reshape(x.shape), pool

    def step(carry):
        state, pool, x = carry
        state, result = pkv.append(state, seq_ids, 1)
        plan = pkv.make_plan(state, seq_ids, 1, result)
        if layers == "unrolled":
            for layer in range(L):
                x, pool = through_layer(x, pool, layer, plan)
        else:
            (x, pool), _ = jax.lax.scan(
                lambda carry, layer: (through_layer(*carry, layer, plan), None),
                (x, pool),
                jnp.arange(L, dtype=jnp.int32),
            )
        return state, pool, x

    return step


def compile_loop(dtype: str, layers: str, loop: str, donated: bool):
    step = decode_step(layers)

    def decode(state, pool, x):
        carry = (state, pool, x)
        if loop == "while_loop":
            return jax.lax.while_loop(lambda carry: carry[0].errors == 0, step, carry)
        if loop == "scan":
            return jax.lax.scan(lambda carry, _: (step(carry), None), carry, None, length=9)[0]
        return step(carry)

    return (
        jax.jit(decode, donate_argnames=("state", "pool") if donated else ())
        .lower(*abstract(dtype), jax.ShapeDtypeStruct((S, H * D), dtype))
        .compile()
    )


def abstract(dtype: str, **changes):
    return (
        jax.eval_shape(lambda: pkv.init(config(dtype, **changes))),
        jax.eval_shape(lambda: pkv.init_pool(config(dtype, **changes))),
    )


def large_operations(compiled, elements: int = LAYER_ELEMENTS) -> list[tuple[str, str]]:
    """(computation, operation) of each instruction that makes an array of so many elements or more.

    Left out are those that make nothing new: they name a buffer, or update a few elements in place.
    The instructions inside of fusions are looked at themselves.
    """
    names_a_buffer = {
        "parameter",
        "get-tuple-element",
        "tuple",
        "while",
        "bitcast",
        "call",
        "fusion",
    }
    in_place = {"scatter", "dynamic-update-slice"}
    found, computation = [], ""
    for line in compiled.as_text().splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = "ENTRY" if header[1] else header[2]
        elif made := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line):
            made_elements = math.prod(map(int, made[1].split(",")))
            if made_elements >= elements and made[2] not in names_a_buffer | in_place:
                found.append((computation, made[2]))
    return found


def assert_in_place(compiled, dtype: str, donated: bool) -> None:
    found = large_operations(compiled)
    memory = compiled.memory_analysis()
    layer_bytes = LAYER_ELEMENTS * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < layer_bytes / 8
    if donated:
        assert found == []
        assert memory.alias_size_in_bytes >= config(dtype).memory_bytes
    else:  # the caller keeps the pool: K and V are copied once, before the loop
        assert found == [("ENTRY", "copy")] * 2


@each_dtype
@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
def test_decode_in_a_while_loop(dtype: str, layers: str, donated: bool):
    compiled = compile_loop(dtype, layers, "while_loop", donated)
    assert_in_place(compiled, dtype, donated)


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_decode_in_a_scan(layers: str):
    assert_in_place(compile_loop("float32", layers, "scan", True), "float32", True)


def test_one_donated_step_without_a_loop():
    assert_in_place(compile_loop("float32", "unrolled", "no loop", True), "float32", True)


def test_this_file_would_see_a_copy():
    """A step that scales the pool is caught."""

    def step(pool):
        return jax.tree.map(lambda array: array * 2, pool)

    compiled = jax.jit(step, donate_argnums=0).lower(abstract("float32")[1]).compile()
    assert large_operations(compiled)


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_a_loop_over_a_single_sequence_is_in_place_too(monkeypatch, layers):
    # A write of one token is no scatter to XLA but an update of a slice, which it fuses differently.
    monkeypatch.setitem(globals(), "S", 1)
    assert_in_place(compile_loop("float32", layers, "scan", True), "float32", True)


UPDATES = {
    "write_prefill": lambda pool, k, blocks: pkv.write_prefill(pool, 1, k, k, 30, blocks),
    "write_token": lambda pool, k, blocks: pkv.write_token(pool, 2, 3, 1, k=k[0], v=k[1]),
    "copy_blocks": lambda pool, k, blocks: pkv.copy_blocks(pool, blocks[:2], blocks[2:]),
    "copy on write": lambda pool, k, blocks: pkv.write_token(
        pkv.copy_blocks(pool, blocks[:2], blocks[2:]), 2, blocks[2], 1, k=k[0], v=k[1]
    ),
}


@each_dtype
@pytest.mark.parametrize("update", UPDATES)
def test_other_updates_of_a_donated_pool_stay_in_place(dtype: str, update: str):
    compiled = (
        jax.jit(UPDATES[update], donate_argnums=0)
        .lower(
            abstract(dtype)[1],
            jax.ShapeDtypeStruct((32, K, D), dtype),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        )
        .compile()
    )
    assert_in_place(compiled, dtype, donated=True)


def test_the_allocator_copies_nothing_as_large_as_the_pool():
    """A loop in which sequences start, grow and end: its work must not grow with the blocks."""
    num_blocks = 100_000
    seq_ids = jnp.arange(S, dtype=jnp.int32)

    def step(state, _):
        state, _ = pkv.allocate(state, seq_ids, 5)
        state, result = pkv.append(state, seq_ids, seq_ids, max_new_tokens=9)
        plan = pkv.make_plan(state, seq_ids, 1, result)
        return pkv.free(state, jnp.where(plan.kv_lens > 6, seq_ids, -1))

    state = jax.eval_shape(
        lambda: pkv.init(dataclasses.replace(config("float32"), num_blocks=num_blocks))
    )
    loop = jax.jit(lambda state: jax.lax.scan(step, state, None, length=9), donate_argnums=0)
    compiled = loop.lower(state).compile()
    assert large_operations(compiled, elements=num_blocks) == []
    assert compiled.memory_analysis().temp_size_in_bytes < num_blocks


def test_attention_memory_does_not_grow_with_the_table():
    def temporaries(max_blocks_per_seq: int) -> int:
        state, pool = abstract("float32", max_blocks_per_seq=max_blocks_per_seq)
        q = jax.ShapeDtypeStruct((S, H, D), jnp.float32)

        def attend(state, pool, q):
            seq_ids = jnp.arange(S, dtype=jnp.int32)
            plan = pkv.make_plan(state, seq_ids, 1, jnp.zeros(S, jnp.int32))
            return pkv.paged_attention(q, pool, 0, plan, implementation="xla")

        return jax.jit(attend).lower(state, pool, q).compile().memory_analysis().temp_size_in_bytes

    # The keys and values of a row would be 2048 x P x K x D x 4 bytes = 8 MB each.
    table_bytes = 4 * S * 2048
    assert temporaries(2048) - temporaries(256) < 4 * table_bytes
