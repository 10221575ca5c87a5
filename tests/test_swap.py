"""swap_out and swap_in: one test for each named behaviour."""

import dataclasses

import jax
import numpy as np
import pytest
from token_pool import TokenWorld, config, ids

import paged_kv_jax as pkv
from paged_kv_jax import swap


@pytest.fixture(params=["numpy", "pinned_host"], autouse=True)
def memory(request, monkeypatch):
    """Both kinds of host memory; this machine's backend would take the first."""
    if request.param == "pinned_host" and jax.default_backend() == "cpu":
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        if request.param not in kinds:
            pytest.skip(f"this backend has memory kinds {kinds} only")

        def to_host(array):
            return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

        monkeypatch.setattr(swap, "_to_host", to_host)


def test_a_sequence_comes_back_with_its_tokens_whatever_was_written_meanwhile():
    world = TokenWorld(config(num_blocks=6))
    tokens = world.extend(s0=10, s1=8)
    world.state, host, result = pkv.swap_out(
        world.state, world.pool, pkv.HostPool(capacity=8), ids(0, -1)
    )
    assert result.tolist() == [3, 0]
    assert (int(world.state.free_top), host.used_blocks) == (4, 3)
    world.extend(s2=16)  # into the blocks it left
    world.check()
    world.state, world.pool, host, result = pkv.swap_in(world.state, world.pool, host, ids(0))
    assert result.tolist() == [-1]  # no room yet: it stays
    assert list(host.sequences) == [0]
    world.state, _ = pkv.free(world.state, ids(2))
    world.state, world.pool, host, result = pkv.swap_in(world.state, world.pool, host, ids(0))
    assert result.tolist() == [3]
    assert host.used_blocks == 0
    assert (world.read(0), world.read(1)) == (tokens["s0"], tokens["s1"])
    world.check()
    new = world.extend(s0=3)["s0"]
    assert world.read(0) == tokens["s0"] + new


def test_a_fork_swapped_out_leaves_the_shared_blocks_to_the_others():
    world = TokenWorld()
    tokens = world.extend(s0=10)["s0"]
    world.state, _, copies = pkv.fork(world.state, ids(0), ids(1))
    world.copy(copies)
    world.state, host, result = pkv.swap_out(world.state, world.pool, pkv.HostPool(8), ids(1))
    assert result.tolist() == [3]
    assert int(world.state.free_top) == 16 - 3
    assert world.read(0) == tokens
    world.state, world.pool, host, _ = pkv.swap_in(world.state, world.pool, host, ids(1))
    assert world.read(0) == world.read(1) == tokens
    world.check()


def test_what_lies_behind_a_window_stays_given_back():
    world = TokenWorld()
    tokens = world.extend(s0=14)["s0"]
    world.state, _ = pkv.release_before(world.state, ids(0), ids(9))
    world.state, host, result = pkv.swap_out(world.state, world.pool, pkv.HostPool(8), ids(0))
    assert result.tolist() == [2]
    world.state, world.pool, host, result = pkv.swap_in(world.state, world.pool, host, ids(0))
    assert result.tolist() == [2]
    assert world.read(0) == [None] * 8 + tokens[8:]
    world.check()


def test_rows_are_served_in_order_and_none_passes_one_that_found_the_host_pool_full():
    world = TokenWorld()
    tokens = world.extend(s0=5, s1=12, s2=4)
    world.state, _, result = pkv.swap_out(
        world.state, world.pool, pkv.HostPool(capacity=4), ids(0, 1, 2)
    )
    assert result.tolist() == [2, -1, -1]
    assert world.read(1) == tokens["s1"]
    with pytest.raises(pkv.PagedKVError, match="OUT_OF_BLOCKS"):
        pkv.raise_if_failed(world.state)


def test_swap_failures_are_reported_and_touch_nothing():
    world = TokenWorld()
    world.extend(s0=5, s1=5)
    world.state, host, result = pkv.swap_out(
        world.state, world.pool, pkv.HostPool(8), ids(0, 0, 3, 6, -2)
    )
    assert result.tolist() == [2, -4, -2, -2, -2]
    world.extend(s0=3)  # the id lives again, and so can neither go nor come
    before = world.state
    state, host, result = pkv.swap_out(world.state, world.pool, host, ids(0))
    assert result.tolist() == [-2]
    state, world.pool, host, result = pkv.swap_in(state, world.pool, host, ids(0, 1, 9, -1))
    assert result.tolist() == [-2, -2, -2, 0]
    for field in dataclasses.fields(state):
        if field.name not in ("errors", "block_size"):
            np.testing.assert_array_equal(getattr(state, field.name), getattr(before, field.name))
    world.state, _ = pkv.free(state, ids(0))
    world.state, world.pool, host, result = pkv.swap_in(world.state, world.pool, host, ids(0, 0))
    assert result.tolist() == [2, -4]


def test_arguments_that_cannot_work_raise():
    with pytest.raises(ValueError, match="capacity=0"):
        pkv.HostPool(capacity=0)
    world = TokenWorld()
    with pytest.raises(ValueError, match="seq_ids has shape"):
        pkv.swap_out(world.state, world.pool, pkv.HostPool(1), np.array([0.5]))
