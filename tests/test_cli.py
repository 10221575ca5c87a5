"""The command line, in process, on a tiny model whose folder is made here."""

import json
import pathlib
import shutil

import pytest
from absl import app

from paged_kv_jax import cli

TINY = pathlib.Path(__file__).parent / "golden" / "tiny" / "llama"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """The tiny Llama with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("model")
    for file in TINY.iterdir():
        shutil.copy(file, folder)
    vocab = {character: index for index, character in enumerate("_*abcdefghijklmnopqrstuvwxyz .,")}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def run(*words: str) -> int:
    arguments = cli._parse(["paged-kv", *words])
    return arguments.run(arguments)


def test_generate_prints_each_prompt_with_its_text_in_order_and_a_report(model_folder, capsys):
    prompts = ["abc", "the quick brown fox", "z"]
    code = run("generate", *prompts, "--model", str(model_folder), "--max-new-tokens", "5")
    printed = capsys.readouterr().out
    assert code == 0
    places = [printed.index(f"[{number}] {text}") for number, text in enumerate(prompts, 1)]
    assert places == sorted(places)
    assert "23 prompt tokens and 15 new tokens" in printed
    # 7, 23 and 5 tokens in blocks of 16, against three caches of 24: 2 layers x 2 heads x 16 x 4 bytes.
    assert "peak 4 of 4 blocks" in printed
    assert "contiguous caches of 24 tokens for 3 prompts" in printed


def test_the_same_prompt_gives_the_same_text_alone_and_in_a_batch(model_folder, capsys):
    def text_of(number, *prompts):
        run("generate", *prompts, "--model", str(model_folder), "--max-new-tokens", "9")
        return capsys.readouterr().out.split(f"[{number}] ")[1].split("\n\n")[0]

    assert text_of(1, "hello") == text_of(2, "something else", "hello")


def test_a_pool_for_one_prompt_at_a_time_serves_them_all_and_one_for_none_exits_1(
    model_folder, capsys
):
    words = ["generate", "abcd", "efgh", "--model", str(model_folder), "--max-new-tokens", "30"]
    words += ["--block-size", "8"]
    assert run(*words, "--num-blocks", "10") == 0
    roomy = capsys.readouterr().out
    assert run(*words, "--num-blocks", "5") == 0  # 4 + 30 - 1 tokens in blocks of 8
    tight = capsys.readouterr().out
    assert tight.split("\n\n")[:2] == roomy.split("\n\n")[:2]
    assert "peak 5 of 5 blocks" in tight
    assert run(*words, "--num-blocks", "4") == 1
    captured = capsys.readouterr()
    assert "prompt 2 was refused, OUT_OF_BLOCKS" in captured.err
    assert "--num-blocks 5 would do" in captured.err
    assert "[2] efgh" in captured.out


def test_prompts_come_from_a_file_with_a_progress_bar_and_print_in_order(
    model_folder, tmp_path, capsys
):
    prompts = ["the quick", "a", "brown fox jumps over", "dog"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts[1:]) + "\n\n")
    words = ["--model", str(model_folder), "--max-new-tokens", "6"]
    assert run("generate", prompts[0], "--file", str(file), *words, "--slots", "2") == 0
    from_file = capsys.readouterr()
    assert "4/4" in from_file.err
    assert "new_tokens=24" in from_file.err
    assert run("generate", *prompts, *words) == 0
    at_once = capsys.readouterr()
    assert at_once.err == ""
    assert from_file.out.split("\n\n")[:4] == at_once.out.split("\n\n")[:4]


def test_options_of_sampling_reach_the_sampler(model_folder, capsys):
    words = ["generate", "hello", "--model", str(model_folder), "--max-new-tokens", "12"]

    def text_with(*more):
        assert run(*words, *more) == 0
        return capsys.readouterr().out.split("\n\n")[0]

    assert text_with("--temperature", "1", "--min-p", "1") == text_with()
    assert text_with("--repetition-penalty", "9") != text_with()


def test_bench_tells_how_fast_the_machine_serves(model_folder, capsys):
    words = ["bench", "--model", str(model_folder), "--requests", "6", "--prompt-tokens", "9"]
    assert run(*words, "--new-tokens", "5", "--slots", "3") == 0
    printed = capsys.readouterr().out
    assert "54 prompt tokens and 30 new tokens" in printed
    assert "preemptions" in printed
    assert run(*words, "--num-blocks", "0") == 2
    assert "num_blocks=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens=0"),
        (["--max-new-tokens", "500"], "128 positions"),
        (["--block-size", "12"], "block_size=12"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--slots", "0"], "--slots=0"),
        (["--min-p", "2"], "min_p=2.0"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_work_is_named_and_exits_2(model_folder, capsys, words, message):
    quick = ["--max-new-tokens", "2"]  # what comes later on the line goes before it
    assert run("generate", "abc", "--model", str(model_folder), *quick, *words) == 2
    assert message in capsys.readouterr().err


def test_info_tells_devices_what_is_picked_and_how_many_tokens_fit(model_folder, capsys):
    assert run("info", "--model", str(model_folder)) == 0
    printed = capsys.readouterr().out
    assert "cpu" in printed
    assert "xla: picked" in printed
    assert "tokens fit" in printed
    # 2 layers x 2 kv heads x 16 elements x 4 bytes x (K and V)
    assert "512 bytes a token" in printed


def test_console_script_exits_with_the_commands_code(model_folder, monkeypatch):
    words = ["paged-kv", "generate", "abc", "--model", "/no/such/model"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(
        app, "run", lambda main, flags_parser: main(flags_parser(words)), raising=True
    )
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
