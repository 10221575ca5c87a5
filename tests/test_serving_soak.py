"""Many small requests with random cancellations: nothing leaks, and what is served is right.

SOAK_REQUESTS sets how many (`make soak`: 20,000).
"""

import os
import resource

import jax
import numpy as np
import pytest
from tiny_model import VOCAB, TinyModel, cache_config

import paged_kv_jax as pkv
from paged_kv_jax.sampling import Sampling
from paged_kv_jax.scheduler import ServingConfig, Status, check_scheduler
from paged_kv_jax.server import Request, Server

pytestmark = pytest.mark.slow

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "120"))
CONFIG = ServingConfig(
    cache=cache_config(14, max_seqs=6, max_blocks=7), max_requests=16, mixed_sizes=(12,),
    decode_sizes=(3,), prefix_reuse=True,
)  # fmt: skip


def random_request(rng: np.random.Generator) -> Request:
    """Mostly greedy; often a beginning that others have, too; now and then several samples."""
    start = [int(rng.integers(3))] * int(rng.choice([0, 4, 8]))
    prompt = start + rng.integers(0, VOCAB, rng.integers(1, 10)).tolist()
    is_drawn = rng.random() < 0.3
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.9) if is_drawn else Sampling()
    return Request(
        prompt=prompt, max_new_tokens=int(rng.integers(1, 12)), sampling=sampling,
        stop_tokens=[int(rng.integers(VOCAB))] if rng.random() < 0.3 else [],
        num_samples=int(rng.choice([1, 1, 1, 3])), salt=int(rng.integers(2)),
    )  # fmt: skip


def assert_sound(server: Server) -> None:
    cache = server.scheduler.cache
    assert check_scheduler(server.scheduler) == []
    assert pkv.check_index(cache.index, cache.state) == []


def assert_greedy(model: TinyModel, request: Request, tokens: list[int], finish: Status) -> None:
    text = model.greedy(list(request.prompt), request.max_new_tokens)
    stops = [nth for nth, token in enumerate(text) if token in request.stop_tokens]
    if finish is Status.CANCELLED:
        assert tokens == text[: len(tokens)]
    else:
        assert tokens == (text[: stops[0]] if stops else text)
        assert finish is (Status.STOP if stops else Status.LENGTH)


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_requests_come_and_go_and_leave_nothing_behind():
    model, rng = TinyModel.create(), np.random.default_rng(1)
    server = Server(model, CONFIG, steps_per_call=4)
    asked: dict[int, Request] = {}
    left: dict[int, int] = {}  # samples of each that have not ended
    texts: dict[tuple[int, int], list[int]] = {}
    finishes = dict.fromkeys(Status, 0)
    num_asked, early_memory, early_arrays = 0, None, None
    while num_asked < REQUESTS or not server.is_idle:
        for _ in range(min(int(rng.integers(0, 6)), REQUESTS - num_asked)):
            request = random_request(rng)
            number = server.add(request)
            asked[number], left[number] = request, request.num_samples
            num_asked += 1
        if asked and rng.random() < 0.3:
            server.cancel(int(rng.choice(list(asked))))
        for update in server.step():
            key = update.request, update.sample
            texts.setdefault(key, []).extend(update.tokens)
            if update.finish is None:
                continue
            finishes[update.finish] += 1
            request, tokens = asked[update.request], texts.pop(key)
            left[update.request] -= 1
            if left[update.request] == 0:
                del asked[update.request], left[update.request]
            if request.sampling.temperature == 0 and rng.random() < 0.1:
                assert_greedy(model, request, tokens, update.finish)
            if update.sample == request.num_samples - 1 and rng.random() < 0.2:
                assert_sound(server)
        if early_memory is None and num_asked >= REQUESTS // 4:
            early_memory, early_arrays = memory_mib(), len(jax.live_arrays())
    assert_sound(server)
    assert finishes[Status.CANCELLED] > REQUESTS // 50
    assert finishes[Status.LENGTH] > REQUESTS // 4
    assert finishes[Status.STOP] > REQUESTS // 50
    assert server.totals.preemptions > 0
    assert abs(len(jax.live_arrays()) - early_arrays) < 8
    assert early_memory is not None
    assert memory_mib() - early_memory < 64
    cache = server.scheduler.cache.forget()
    assert int(cache.state.free_top) == CONFIG.cache.num_blocks
    print({status.name: count for status, count in finishes.items() if count}, server.totals)
