"""Generation through the paged cache against a plain loop over full forward passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paged_kv_jax as pkv
from paged_kv_jax import generation
from paged_kv_jax.generation import Finish, blocks_needed, generate
from paged_kv_jax.models.contiguous import contiguous_forward, init_cache
from paged_kv_jax.models.llama import Llama, LlamaConfig
from paged_kv_jax.sampling import Sampling

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8, max_position=256,
)  # fmt: skip
PROMPTS = [[5, 9, 2], [7] * 17, [1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(7))


@pytest.fixture(scope="module")
def greedy(model):
    """Greedy continuations, 12 tokens each, by a full forward pass for every token."""
    full = jax.jit(lambda tokens: model.logits(contiguous_forward(
        model, tokens, jnp.zeros(1, jnp.int32), init_cache(CONFIG, 1, 32))[0]))  # fmt: skip
    texts = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(12):
            padded = jnp.asarray([tokens + [0] * (32 - len(tokens))], jnp.int32)
            tokens.append(int(jnp.argmax(full(padded)[0, len(tokens) - 1])))
        texts.append(tokens[len(prompt) :])
    return texts


def cache_config(num_blocks, *, block_size=4, max_blocks_per_seq=8):
    return CONFIG.kv_cache_config(
        num_blocks=num_blocks, block_size=block_size, max_seqs=len(PROMPTS),
        max_blocks_per_seq=max_blocks_per_seq, dtype=jnp.float32,
    )  # fmt: skip


@pytest.mark.parametrize("prefill_tokens", [512, 5])
def test_greedy_text_equals_full_forward_passes(model, greedy, prefill_tokens):
    generated = generate(
        model, PROMPTS, config=cache_config(40), max_new_tokens=12, prefill_tokens=prefill_tokens
    )
    assert generated.tokens == greedy
    assert generated.finish == [Finish.LENGTH] * 4


def test_sequences_stop_at_a_stop_token_and_give_their_blocks_back(model, greedy):
    stop = greedy[1][4]
    expected = [text[: text.index(stop)] if stop in text else text for text in greedy]
    generated = generate(
        model, PROMPTS, config=cache_config(40), max_new_tokens=12, stop_tokens=[stop]
    )
    assert generated.tokens == expected
    reasons = [Finish.STOP if stop in text else Finish.LENGTH for text in greedy]
    assert generated.finish == reasons


def test_every_block_is_free_at_the_end(model):
    batch = generation._start(cache_config(20), [False] * 2, 6, 0)
    stop = jnp.zeros(0, jnp.int32)
    (chunk,) = generation._prefill_chunks([[1, 2, 3], [4] * 9], 12)
    batch = generation.prefill_chunk(model, batch, *chunk, stop, sampling=Sampling())
    assert int(pkv.stats(batch.cache.state).used_blocks) == 1 + 3
    batch = generation.decode_loop(model, batch, 16, stop, sampling=Sampling())
    assert int(pkv.stats(batch.cache.state).used_blocks) == 0
    assert pkv.check_invariants(batch.cache.state) == []
    assert int(batch.peak_blocks) == 2 + 4  # 3 + 5 and 9 + 5 tokens in blocks of 4


def test_blocks_needed_is_enough_and_one_less_is_not(model, greedy):
    needed = blocks_needed([len(prompt) for prompt in PROMPTS], 12, 4)
    enough = generate(model, PROMPTS, config=cache_config(needed), max_new_tokens=12)
    assert enough.tokens == greedy
    assert enough.peak_blocks == needed == enough.blocks_needed
    short = generate(model, PROMPTS, config=cache_config(needed - 1), max_new_tokens=12)
    assert Finish.OUT_OF_BLOCKS in short.finish


def test_a_prompt_that_runs_out_keeps_its_text_and_the_others_go_on(model, greedy):
    # 17 + 12 tokens need 8 blocks; with 9 in all, prompt 1 has to make room.
    generated = generate(model, PROMPTS[:3], config=cache_config(9), max_new_tokens=12)
    assert Finish.LENGTH in generated.finish
    assert Finish.OUT_OF_BLOCKS in generated.finish
    for text, finish, full in zip(generated.tokens, generated.finish, greedy, strict=False):
        assert text == full[: len(text)]
        assert len(text) == 12 or finish == Finish.OUT_OF_BLOCKS


def test_a_prompt_that_no_pool_of_this_size_holds_takes_no_room_from_others(model, greedy):
    # Prompt 1 (17 tokens, 5 blocks) never fits into 4; those around it must not notice.
    prompts = [PROMPTS[1], PROMPTS[0], [2] * 17]
    generated = generate(model, prompts, config=cache_config(4), max_new_tokens=12)
    assert generated.finish == [Finish.OUT_OF_BLOCKS, Finish.LENGTH, Finish.OUT_OF_BLOCKS]
    assert generated.tokens == [[], greedy[0], []]


def test_a_prompt_that_finds_the_pool_taken_leaves_the_others_tokens_in_step(model, greedy):
    # 5 + 1 of 7 blocks are taken when prompt 3 (3 blocks) comes: its tokens leave the chunk.
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[2]]
    generated = generate(model, prompts, config=cache_config(7), max_new_tokens=1)
    assert generated.finish == [Finish.LENGTH, Finish.OUT_OF_BLOCKS, Finish.OUT_OF_BLOCKS]
    chunked = generate(model, prompts, config=cache_config(7), max_new_tokens=1, prefill_tokens=17)
    assert chunked.finish == [Finish.LENGTH] * 3
    assert generated.tokens[0] == chunked.tokens[0] == greedy[1][:1]
    assert chunked.tokens[1:] == [greedy[3][:1], greedy[2][:1]]


def test_tokens_stream_in_order_and_once(model, greedy):
    streamed, finished = [[] for _ in PROMPTS], []
    generate(
        model, PROMPTS, config=cache_config(40), max_new_tokens=12, steps_per_loop=5,
        on_tokens=lambda index, tokens: streamed[index].extend(tokens),
        on_finish=finished.append,
    )  # fmt: skip
    assert streamed == greedy
    assert sorted(finished) == [0, 1, 2, 3]


def test_sampled_text_does_not_depend_on_the_pool_or_the_chunks(model):
    sampling = Sampling(temperature=1.0, top_k=20)
    texts = [
        generate(
            model,
            PROMPTS,
            config=cache_config(60, block_size=block_size),
            max_new_tokens=12,
            sampling=sampling,
            seed=3,
            prefill_tokens=chunk,
            steps_per_loop=steps,
        ).tokens
        for block_size, chunk, steps in [(4, 512, 16), (4, 7, 3)]
    ]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, r"prompts\[1\] has no tokens"),
        ({"prompts": [[1]] * 5}, "config.max_seqs=4"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
    ],
)
def test_arguments_that_cannot_work_are_named(model, arguments, message):
    call = {"prompts": PROMPTS, "max_new_tokens": 2, "prefill_tokens": 8} | arguments
    with pytest.raises(ValueError, match=message):
        generate(model, call.pop("prompts"), config=cache_config(40), **call)


def test_decode_does_not_recompile_when_lengths_change(model):
    stop = jnp.zeros(0, jnp.int32)
    before = generation.decode_loop._cache_size()
    for num_steps in (1, 2, 5):
        batch = generation._start(cache_config(21), [False] * 2, 6, num_steps)
        (chunk,) = generation._prefill_chunks([[1] * num_steps, [4] * (12 - num_steps)], 12)
        batch = generation.prefill_chunk(model, batch, *chunk, stop, sampling=Sampling())
        batch = generation.decode_loop(model, batch, num_steps, stop, sampling=Sampling())
        np.testing.assert_array_equal(batch.num_outputs, min(1 + num_steps, 6))
    assert generation.decode_loop._cache_size() - before == 1
