"""Makes the golden files of the model tests with Hugging Face transformers, in float32 on the CPU.

    pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0
    python tests/golden/make_golden.py --gguf PATH/SmolLM2-135M-Instruct.Q4_1.gguf

Writes, next to this file:
  smollm2.npz     for three prompts: token ids, logits and the first 64 greedy tokens of SmolLM2;
  tiny/<name>/    tiny random models as transformers saves them (bfloat16), each with golden.npz:
                  tokens [T] and the float32 logits [T, vocab] of the float32 computation.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
GREEDY_TOKENS = 64
STRIDE = 397  # of the vocabulary entries kept at every position; prime, so that no pattern is met
STEP = (
    2.0**-14
)  # logits are stored as multiples of this (6e-5): the file compresses, at 3 % of the tolerance

PROMPTS = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "dialogue": [
        {"role": "system", "content": "You answer in one short paragraph."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red light."},
        {"role": "user", "content": "And why are sunsets red? Explain it to a 10-year-old."},
    ],
    "text": "Naïve café owners in Zürich sold 1234 croissants (at 3.50 each) in 2019;\n\n  by 2020",
}

BASE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=None,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
    high_freq_factor=4.0, original_max_position_embeddings=32,
)  # fmt: skip
TINY = {
    "llama": lambda: transformers.LlamaConfig(**BASE, head_dim=16, tie_word_embeddings=False),
    "llama3": lambda: transformers.LlamaConfig(
        **BASE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralConfig(**BASE, head_dim=8, sliding_window=5),
}


def rounded(logits: torch.Tensor) -> np.ndarray:
    """float32 logits as multiples of STEP, which compress."""
    return (np.round(logits.double().numpy() / STEP) * STEP).astype(np.float32)


def make_tiny(name: str, seed: int) -> None:
    """Saves one tiny random model and the logits of 24 random tokens."""
    torch.manual_seed(seed)
    folder = HERE / "tiny" / name
    model = transformers.AutoModelForCausalLM.from_config(TINY[name](), attn_implementation="eager")
    for parameter in model.parameters():  # norms and biases are trivial unless they are drawn too
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.5)
    shard = {"max_shard_size": "12KB"} if name == "llama" else {}
    model.to(torch.bfloat16).save_pretrained(folder, **shard)
    for file in folder.iterdir():
        file.chmod(0o644)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, BASE["vocab_size"], (1, 24))
    with torch.no_grad():
        logits = model(tokens).logits[0]
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens[0].int().numpy(), logits=logits.float().numpy()
    )


def make_smollm2(gguf: pathlib.Path) -> None:
    """Stores SmolLM2's answers to the three prompts."""
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    )
    arrays = {}
    for name, prompt in PROMPTS.items():
        text = prompt
        if not isinstance(prompt, str):
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(tokens).logits[0]
            greedy, gaps = list(tokens[0].tolist()), []
            cache, new = None, tokens
            for _ in range(GREEDY_TOKENS):
                out = model(new, cache=cache, use_cache=True)
                cache, last = out.past_key_values, out.logits[0, -1]
                best = torch.topk(last, 2).values
                gaps.append(float(best[0] - best[1]))
                greedy.append(int(last.argmax()))
                new = torch.tensor([[greedy[-1]]])
        top = torch.topk(logits, 8)
        arrays |= {
            f"{name}_text": np.array(text),
            f"{name}_tokens": tokens[0].int().numpy(),
            f"{name}_last_logits": rounded(logits[-1]),
            f"{name}_strided_logits": rounded(logits[:, ::STRIDE]),
            f"{name}_top_ids": top.indices.int().numpy(),
            f"{name}_top_logits": rounded(top.values),
            f"{name}_greedy": np.array(greedy[-GREEDY_TOKENS:], np.int32),
        }
        print(f"{name}: {tokens.shape[1]} tokens, smallest gap of the best two {min(gaps):.4f}")
        print(repr(text + tokenizer.decode(greedy[-GREEDY_TOKENS:])))
    np.savez_compressed(HERE / "smollm2.npz", stride=np.array(STRIDE), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for seed, name in enumerate(TINY):
        make_tiny(name, seed)
    make_smollm2(parser.parse_args().gguf)


if __name__ == "__main__":
    main()
