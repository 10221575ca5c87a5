"""Continuous batching against a plain loop over one request at a time."""

import collections
import functools

import jax
import numpy as np
import pytest
from tiny_model import VOCAB, TinyModel, cache_config

import paged_kv_jax as pkv
from paged_kv_jax.errors import ResultCode
from paged_kv_jax.sampling import Sampling
from paged_kv_jax.scheduler import Scheduler, ServingConfig, Status, check_scheduler
from paged_kv_jax.server import Request, Server
from paged_kv_jax.serving import run_until

pytestmark = pytest.mark.slow

MODEL = TinyModel.create()
# 16 blocks of 4 for up to 4 requests that may take 10 each; prompts in chunks of up to 8 tokens.
PLAIN = ServingConfig(
    cache=cache_config(16), max_requests=8, mixed_sizes=(8,), max_stop_tokens=2
)  # fmt: skip
REUSE = ServingConfig(
    cache=cache_config(16),
    max_requests=8,
    mixed_sizes=(4, 8),
    decode_sizes=(2,),
    max_stop_tokens=2,
    prefix_reuse=True,
)
SWAPS = ServingConfig(
    cache=cache_config(16), max_requests=8, mixed_sizes=(8,), max_stop_tokens=2, swaps=True
)


@functools.cache
def greedy(prompt: tuple[int, ...], num_tokens: int, penalty: float = 1.0) -> list[int]:
    return MODEL.greedy(list(prompt), num_tokens, penalty)


def requests(count: int, seed: int = 0, **options) -> list[Request]:
    """Prompts of 1 to 19 tokens, many of which begin alike, and 1 to 20 new tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCAB, 9).tolist()
    made = []
    for _ in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        if rng.random() < 0.5:
            prompt = (common + prompt)[: max(10, len(prompt))]
        made.append(Request(prompt=prompt, max_new_tokens=int(rng.integers(1, 21)), **options))
    return made


def server(config: ServingConfig, steps_per_call: int = 3) -> Server:
    host_blocks = 12 if config.swaps else 0
    return Server(MODEL, config, steps_per_call=steps_per_call, host_blocks=host_blocks)


def assert_sound(serving: Server) -> None:
    cache = serving.scheduler.cache
    broken = check_scheduler(serving.scheduler)
    if cache.index is None:
        broken += pkv.check_invariants(cache.state)
    else:
        broken += pkv.check_index(cache.index, cache.state)
    assert broken == []


def assert_all_free(serving: Server) -> None:
    cache = serving.scheduler.cache
    held = 0 if cache.index is None else int(np.sum(np.asarray(cache.index.is_held)))
    assert int(cache.state.free_top) + held == cache.config.num_blocks


def texts_of(serving: Server) -> dict[tuple[int, int], list[int]]:
    """Runs the server until it is idle, looking at all invariants on the way."""
    texts = collections.defaultdict(list)
    for update in serving.stream():
        texts[update.request, update.sample] += update.tokens
        if update.finish is not None:
            assert_sound(serving)
    assert_all_free(serving)
    return dict(texts)


@pytest.mark.parametrize("config", [PLAIN, REUSE, SWAPS], ids=["plain", "reuse", "swaps"])
def test_texts_equal_one_by_one_runs_though_requests_were_preempted(config):
    serving, asked = server(config), requests(14)
    numbers = [serving.add(request) for request in asked]
    texts = texts_of(serving)
    for number, request in zip(numbers, asked, strict=True):
        assert texts[number, 0] == greedy(tuple(request.prompt), request.max_new_tokens)
    assert serving.totals.preemptions > 0
    assert serving.totals.new_tokens == sum(request.max_new_tokens for request in asked)
    assert serving.totals.peak_blocks <= 16
    written = sum(len(r.prompt) + r.max_new_tokens - 1 for r in asked)
    if config is PLAIN:  # what was preempted was computed again
        assert serving.totals.computed_tokens > written
    if config is REUSE:
        assert serving.totals.computed_tokens < written
    if config is SWAPS:
        assert serving.totals.computed_tokens == written


def test_a_request_swapped_out_with_no_room_on_the_host_is_computed_again():
    serving, asked = Server(MODEL, SWAPS, steps_per_call=3, host_blocks=1), requests(14)
    for request in asked:
        serving.add(request)
    texts = texts_of(serving)
    assert texts == {
        (number, 0): greedy(tuple(request.prompt), request.max_new_tokens)
        for number, request in enumerate(asked)
    }
    written = sum(len(r.prompt) + r.max_new_tokens - 1 for r in asked)
    assert serving.totals.computed_tokens > written


@pytest.mark.parametrize("config", [PLAIN, REUSE], ids=["plain", "reuse"])
def test_samples_of_one_prompt_equal_separate_requests_and_compute_it_once(config):
    drawn = Sampling(temperature=1.0, top_k=12)
    prompt = list(range(14))
    serving = server(config)
    serving.add(Request(prompt=prompt, max_new_tokens=6, sampling=drawn, seed=40, num_samples=4))
    together = texts_of(serving)
    assert serving.totals.preemptions == 0
    # The first computes all of the prompt, the others its last token only.
    assert serving.totals.computed_tokens == 14 + 3 + 4 * 5
    alone = server(config)
    for nth in range(4):
        alone.add(Request(prompt=prompt, max_new_tokens=6, sampling=drawn, seed=40 + nth))
        assert texts_of(alone)[nth, 0] == together[0, nth]
    assert len({tuple(text) for text in together.values()}) == 4


def test_samples_under_shortage_and_of_one_token_prompts_are_right_too():
    drawn = Sampling(temperature=1.0)
    asked = [
        Request(prompt=prompt, max_new_tokens=18, sampling=drawn, seed=7, num_samples=5)
        for prompt in ([3], list(range(18)), [5, 6])
    ]
    serving = server(PLAIN)
    for request in asked:
        serving.add(request)
    texts = texts_of(serving)
    assert serving.totals.preemptions > 0
    for number, request in enumerate(asked):
        for nth in range(5):
            alone = server(PLAIN)
            alone.add(
                Request(prompt=request.prompt, max_new_tokens=18, sampling=drawn, seed=7 + nth)
            )
            assert texts_of(alone)[0, 0] == texts[number, nth]


def test_a_sampled_text_does_not_depend_on_what_else_is_served():
    drawn = Sampling(temperature=0.8, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    request = Request(prompt=[4, 8, 15, 16], max_new_tokens=20, sampling=drawn, seed=23)
    alone = server(PLAIN)
    alone.add(request)
    text = texts_of(alone)[0, 0]
    crowd = server(PLAIN, steps_per_call=5)
    before = requests(7, seed=1, sampling=Sampling(temperature=1.0, top_k=3))
    for other in before:
        crowd.add(other)
    number = crowd.add(request)
    for other in requests(5, seed=2):
        crowd.add(other)
    assert texts_of(crowd)[number, 0] == text
    assert crowd.totals.preemptions > 0


def test_each_request_has_options_of_its_own():
    prompt = (1, 2, 3)
    plain, penalised = greedy(prompt, 12), greedy(prompt, 12, 1.7)
    assert plain != penalised
    stop = plain[5]
    serving = server(PLAIN)
    serving.add(Request(prompt=prompt, max_new_tokens=12))
    serving.add(
        Request(prompt=prompt, max_new_tokens=12, sampling=Sampling(repetition_penalty=1.7))
    )
    serving.add(Request(prompt=prompt, max_new_tokens=12, stop_tokens=[VOCAB + 5, stop]))
    # Only the most likely token is as likely as itself.
    cut = Sampling(temperature=1.0, min_p=1.0)
    serving.add(Request(prompt=prompt, max_new_tokens=12, sampling=cut))
    results = serving.run()
    assert results[0, 0].tokens == results[3, 0].tokens == plain
    assert results[1, 0].tokens == penalised
    assert results[2, 0].tokens == plain[: plain.index(stop)]
    finishes = [results[number, 0].finish for number in range(4)]
    assert finishes == [Status.LENGTH, Status.LENGTH, Status.STOP, Status.LENGTH]


def test_what_never_fits_is_refused_at_once_and_holds_nobody_up():
    serving = server(PLAIN)
    serving.add(Request(prompt=[1] * 30, max_new_tokens=12))  # 41 tokens to write, 40 at most
    serving.add(Request(prompt=[1] * 30, max_new_tokens=11))
    serving.add(Request(prompt=[], max_new_tokens=3))
    serving.add(Request(prompt=[1], max_new_tokens=0))
    first = serving.step()
    refused = {u.request: u.refusal for u in first if u.finish is Status.REFUSED}
    assert refused == {
        0: ResultCode.SEQ_TOO_LONG, 2: ResultCode.INVALID_COUNT, 3: ResultCode.INVALID_COUNT
    }  # fmt: skip
    assert serving.run()[1, 0].finish is Status.LENGTH
    small = Server(MODEL, ServingConfig(cache=cache_config(5), max_requests=2, mixed_sizes=(8,)))
    small.add(Request(prompt=[1] * 18, max_new_tokens=4))  # 21 tokens, 20 in the pool
    (update,) = small.step()
    assert (update.finish, update.refusal) == (Status.REFUSED, ResultCode.OUT_OF_BLOCKS)
    assert small.is_idle


def test_cancelled_requests_give_their_blocks_back_and_leave_the_others_alone():
    for config in (PLAIN, REUSE, SWAPS):
        serving, asked = server(config), requests(14)
        numbers = [serving.add(request) for request in asked]
        serving.step()
        running = set(np.asarray(serving.scheduler.slot_request).tolist()) - {-1}
        gone = {0, 2, 5, 13}  # in a slot, in the queue, and not on the device yet
        assert running & gone
        assert running < set(range(8))
        for number in gone:
            serving.cancel(number)
            assert_sound(serving)
        serving.cancel(0)
        results = serving.run()
        assert_all_free(serving)
        for number in numbers:
            text = greedy(tuple(asked[number].prompt), asked[number].max_new_tokens)
            if number in gone:
                assert results[number, 0].finish is Status.CANCELLED
            else:
                assert results[number, 0].finish is Status.LENGTH
                assert results[number, 0].tokens == text


def test_nothing_compiles_after_the_first_requests_whatever_comes():
    serving = server(PLAIN)
    serving.warm_up()
    compilations = []

    def note(event: str, *_args, **_kwargs) -> None:
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    programs = run_until._cache_size()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for request in requests(20, seed=3):
            serving.add(request)
        serving.add(
            Request(
                prompt=[1, 2], max_new_tokens=9, num_samples=3, salt=4, seed=9, stop_tokens=[7],
                sampling=Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1),
            )
        )  # fmt: skip
        serving.step()
        serving.cancel(3)
        serving.run()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compilations == []
    assert run_until._cache_size() == programs


def test_requests_start_in_order_of_arrival_and_the_oldest_never_loses_its_blocks():
    serving = server(PLAIN, steps_per_call=1)
    for request in requests(14, seed=4):
        serving.add(request)
    started, oldest_slot = [], {}
    while not serving.is_idle:
        serving.step()
        requests_on_device = serving.scheduler.requests
        arrival = np.asarray(requests_on_device.arrival)
        slots = np.asarray(serving.scheduler.slot_request)
        running = {int(arrival[entry]): slot for slot, entry in enumerate(slots) if entry >= 0}
        started += sorted(set(running) - set(started))
        if not running:
            continue
        oldest = min(running)
        # Once the oldest of all, it stays where it is until it ends, as nothing older comes.
        assert oldest_slot.setdefault(oldest, running[oldest]) == running[oldest]
        assert oldest == max(oldest_slot)
    assert serving.totals.preemptions > 0
    assert started == sorted(started)


def test_the_compiled_loop_makes_no_copy_of_the_pool():
    config = ServingConfig(cache=cache_config(4096), max_requests=8, mixed_sizes=(8,))
    scheduler = jax.eval_shape(lambda: Scheduler.create(config))
    compiled = run_until.lower(MODEL, scheduler, config, 4).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < config.cache.memory_bytes / 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_requests": 0}, "max_requests=0"),
        ({"mixed_sizes": (2, 3)}, "cache.max_seqs=4"),
        ({"mixed_sizes": (0, 8)}, "mixed_sizes"),
        ({"decode_sizes": (5,)}, "decode_sizes"),
        ({"max_admissions": 0}, "max_admissions=0"),
    ],
)
def test_sizes_that_cannot_work_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ServingConfig(**({"cache": cache_config(8), "max_requests": 4} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**31}, "seed=2147483648"),
        ({"salt": 2**31}, "salt=2147483648"),
        ({"stop_tokens": [1, 2, 3]}, "3 stop tokens"),
        ({"stop_tokens": [-1]}, "stop_tokens"),
        ({"prompt": [1, -2]}, "prompt"),
    ],
)
def test_requests_that_cannot_work_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        server(PLAIN).add(Request(**({"prompt": [1], "max_new_tokens": 1} | fields)))


def test_host_blocks_go_with_swaps_and_calls_make_a_step():
    with pytest.raises(ValueError, match="host_blocks=3"):
        Server(MODEL, PLAIN, host_blocks=3)
    with pytest.raises(ValueError, match="steps_per_call=0"):
        Server(MODEL, PLAIN, steps_per_call=0)
