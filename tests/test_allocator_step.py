"""`step` in one kernel against `append` and `make_plan`: every array of state and plan, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_triton_kernels import lower

import paged_kv_jax as pkv
from paged_kv_jax import dispatch
from paged_kv_jax.kernels import allocator_step_triton

# max_seqs, max_blocks_per_seq, block_size, num_blocks, rows, tokens a row
SMALL = (9, 6, 2, 24, 20, 3)
LARGE = [
    (1024, 64, 16, 2000, 1024, 1),
    (300, 20, 1, 1500, 1000, 3),
    (4096, 300, 16, 100_000, 4096, 1),
    (1024, 64, 16, 3000, 1024, 40),
]
STATE = (
    "block_table", "seq_lens", "seq_block_count", "free_list", "free_top", "ref_count", "errors",
)  # fmt: skip


def config(max_seqs, max_blocks, block_size, num_blocks) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=num_blocks, block_size=block_size,
        max_seqs=max_seqs, max_blocks_per_seq=max_blocks,
    )  # fmt: skip


def fields(state: pkv.BlockState) -> tuple[jax.Array, ...]:
    return tuple(getattr(state, name) for name in STATE)


@functools.partial(jax.jit, static_argnames="n")
def separately(state, seq_ids, n):
    """What the kernel's outputs must be, in their order."""
    new, result = pkv.append(state, seq_ids, n)
    plan = pkv.make_plan(new, seq_ids, n, result)
    return (
        new.block_table, new.seq_lens, new.seq_block_count, new.free_top, new.ref_count, new.errors,
        result, plan.block_table, plan.kv_lens, plan.cu_q_lens, plan.slot_mapping, plan.positions,
        plan.token_rows, plan.errors,
    )  # fmt: skip


def fused(n: int, block_size: int, interpret: bool):
    kernel = functools.partial(
        allocator_step_triton.step, num_new_tokens=n, block_size=block_size, interpret=interpret
    )
    return jax.jit(lambda state, seq_ids: kernel(*fields(state), seq_ids))


@jax.jit
def started(state, seq_ids, lens, ended):
    state, _ = pkv.allocate(state, seq_ids, lens)
    windowed = jnp.where(lens % 3 == 0, seq_ids, -1)
    state, _ = pkv.release_before(state, windowed, lens // 2)  # leaves holes in the table
    state, _ = pkv.free(state, ended)
    return state  # its sticky word is set by some, and must stay


def random_call(rng, max_seqs, max_blocks, block_size, num_blocks, num_rows):
    """A state with some sequences live, and rows: live, dead, doubled, padding and out of range."""
    start, seq_ids = (
        rng.permutation(max(num_rows, max_seqs))[:size] for size in (max_seqs, num_rows)
    )
    lens = rng.integers(1, 1 + max_blocks * block_size, max_seqs)
    lens = np.minimum(lens, 1 + rng.poisson(1.1 * num_blocks * block_size / max_seqs, max_seqs))
    ended = np.where(rng.random(max_seqs) < 0.2, start, -1)
    start = np.where(rng.random(max_seqs) < 0.1, -1, start)
    seq_ids = np.where(seq_ids < max_seqs, seq_ids, -1)
    arrays = (jnp.asarray(array, jnp.int32) for array in (start, lens, ended))
    state = started(pkv.init(config(max_seqs, max_blocks, block_size, num_blocks)), *arrays)
    if rng.random() < 0.3:  # nothing but live sequences, each once: most such calls succeed
        seq_ids = np.where(np.isin(seq_ids, np.flatnonzero(state.seq_lens)), seq_ids, -1)
        return state, jnp.asarray(seq_ids, jnp.int32)
    doubled = rng.random(num_rows) < rng.choice([0.0, 0.2, 1.0])
    seq_ids = np.where(doubled, rng.integers(0, rng.integers(1, max_seqs + 1), num_rows), seq_ids)
    odd = rng.random(num_rows) < 0.1
    seq_ids = np.where(odd, rng.choice([-1, max_seqs, -2, 2**31 - 1, -(2**31)], num_rows), seq_ids)
    return state, jnp.asarray(seq_ids, jnp.int32)


def assert_agrees(shape, interpret: bool, calls: int) -> set[int]:
    """Compare random calls of one shape; the results that were met."""
    *geometry, num_rows, n = shape
    step, met = fused(n, geometry[2], interpret), set()
    for seed in range(calls):
        state, seq_ids = random_call(np.random.default_rng(seed), *geometry, num_rows)
        expected = separately(state, seq_ids, n)
        for nth, (got, want) in enumerate(zip(step(state, seq_ids), expected, strict=True)):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want), f"{seed=}, {nth=}")
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
        met |= set(np.unique(np.asarray(expected[6])).tolist())
    return met


def test_agrees_with_append_and_make_plan_whatever_the_rows():
    assert assert_agrees(SMALL, interpret=True, calls=40) >= {-4, -3, -2, -1, 0, 1, 2}


def test_lowers_for_cuda_with_the_state_in_place():
    for max_seqs, max_blocks, block_size, num_blocks, num_rows, n in (SMALL, *LARGE[2:]):
        state = pkv.init(config(max_seqs, max_blocks, block_size, num_blocks))
        kernel = functools.partial(
            allocator_step_triton.step, num_new_tokens=n, block_size=block_size
        )
        text = lower(kernel, *fields(state), jnp.zeros(num_rows, jnp.int32))
        assert "paged_kv_step_triton" in text
        assert text.count("output_operand_alias<") == 6


def test_says_what_it_does_not_serve():
    def reason(*, rows=8, seqs=8, columns=4, n: object = 1, capability: float | None = 9.0):
        shapes = (
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((seqs, columns), jnp.int32),
        )
        return str(
            allocator_step_triton.step_unsupported_reason(
                *shapes, num_new_tokens=n, compute_capability=capability
            )
        )

    assert reason() == reason(rows=4096, seqs=65_536, columns=1024, n=64, capability=8.0) == "None"
    assert "7.5" in reason(capability=7.5)
    assert "num_new_tokens=65" in reason(n=65)
    assert "num_new_tokens is an array" in reason(n=jnp.ones(8, jnp.int32))
    assert "4097 rows" in reason(rows=4097)
    assert "0 rows" in reason(rows=0)
    assert "max_seqs=65537" in reason(seqs=65_537)
    assert "max_blocks_per_seq=1025" in reason(columns=1025)


def test_step_calls_the_kernel_that_is_picked_also_under_vmap(monkeypatch):
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(
        dispatch, "kernel", lambda *_: functools.partial(allocator_step_triton.step, interpret=True)
    )
    state, seq_ids = random_call(np.random.default_rng(0), 5, 3, 4, 9, 4)
    states = jax.tree.map(lambda *both: jnp.stack(both), state, pkv.free(state, seq_ids[:1])[0])

    def stepped(implementation):
        return jax.jit(
            jax.vmap(lambda state: pkv.step(state, seq_ids, 1, implementation=implementation))
        )(states)

    jax.tree.map(np.testing.assert_array_equal, stepped(None), stepped("xla"))


def test_ragged_counts_and_what_does_not_fit_the_plan():
    state, _ = pkv.allocate(pkv.init(config(4, 4, 4, 16)), jnp.arange(3), 3)
    counts = jnp.asarray([2, 1, 3])
    new, plan, result = pkv.step(state, jnp.arange(3), counts, num_tokens=5)
    assert result.tolist() == [1, 0, 1]
    assert plan.cu_q_lens.tolist() == [0, 2, 3, 3]  # the third does not fit into 5
    assert int(new.errors) == int(plan.errors) == pkv.ResultCode.PLAN_OVERFLOW.bit
    with pytest.raises(ValueError, match="num_tokens=5"):
        pkv.step(state, jnp.arange(3), 1, num_tokens=5)
    with pytest.raises(NotImplementedError, match="triton needs an NVIDIA GPU"):
        pkv.step(state, jnp.arange(3), counts, num_tokens=5, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SMALL, *LARGE], ids=str)
def test_agrees_on_the_gpu(shape):
    assert_agrees(shape, interpret=False, calls=12)


@pytest.mark.gpu
def test_a_loop_on_the_gpu_agrees_and_copies_nothing_of_the_state():
    num_blocks, num_rows = 1_000_000, 1024
    seq_ids = jnp.asarray(np.random.default_rng(0).permutation(num_rows), jnp.int32)
    state, _ = pkv.allocate(pkv.init(config(num_rows, 64, 16, num_blocks)), seq_ids, seq_ids % 16)

    def loop(implementation):
        def step(state, _):
            state, plan, _ = pkv.step(state, seq_ids, 1, implementation=implementation)
            return state, plan.slot_mapping

        return jax.jit(lambda state: jax.lax.scan(step, state, length=500), donate_argnums=0)

    by_kernel = loop("triton").lower(state).compile()
    assert by_kernel.memory_analysis().temp_size_in_bytes < 4 * num_blocks
    expected = loop("xla")(jax.tree.map(jnp.copy, state))
    jax.tree.map(np.testing.assert_array_equal, by_kernel(state), expected)
