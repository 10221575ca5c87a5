"""The command line, in process, on a tiny model whose folder is made here."""

import json
import pathlib
import shutil

import pytest
from absl import app

from paged_kv_jax import cli

pytestmark = pytest.mark.slow

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


PROMPTS = ["the quick", "a", "brown fox jumps over", "the quick"]
WORDS = ["--max-new-tokens", "6", "--slots", "2"]


def test_generate_prints_each_prompt_with_its_text_in_order_and_a_report(model_folder, capsys):
    assert run("generate", *PROMPTS, "--model", str(model_folder), *WORDS) == 0
    printed = capsys.readouterr().out
    places = [printed.index(f"[{number}] {text}") for number, text in enumerate(PROMPTS, 1)]
    assert places == sorted(places)
    assert "39 prompt tokens and 24 new tokens" in printed
    # Two at once: 25 and 14 tokens in blocks of 16, against two caches of 26.
    assert "peak 3 of 3 blocks" in printed
    assert "contiguous caches of 26 tokens for 2 prompts" in printed


def test_a_prompt_that_no_pool_of_this_size_serves_is_said_and_exits_1(model_folder, capsys):
    words = ["generate", "abcd", "efghijklmnop", "--model", str(model_folder)]
    words += ["--max-new-tokens", "30", "--block-size", "8", "--num-blocks", "5"]
    assert run(*words) == 1  # 4 + 30 - 1 tokens in blocks of 8, and 12 + 30 - 1
    captured = capsys.readouterr()
    assert "prompt 2 was refused, OUT_OF_BLOCKS" in captured.err
    assert "--num-blocks 6 would do" in captured.err
    assert "30 new tokens" in captured.out
    assert "peak 5 of 5 blocks" in captured.out
    assert "[2] efghijklmnop" in captured.out


def test_prompts_from_a_file_print_the_same_in_order_beside_a_progress_bar(
    model_folder, tmp_path, capsys
):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS[1:]) + "\n\n")
    words = ["--model", str(model_folder), *WORDS]
    assert run("generate", PROMPTS[0], "--file", str(file), *words) == 0
    from_file = capsys.readouterr()
    assert "4/4" in from_file.err
    assert "new_tokens=24" in from_file.err
    assert run("generate", *PROMPTS, *words) == 0
    at_once = capsys.readouterr()
    assert at_once.err == ""
    texts = from_file.out.split("\n\n")[:4]
    assert texts == at_once.out.split("\n\n")[:4]
    assert texts[0].removeprefix("[1]") == texts[3].removeprefix("[4]")
    # The most likely token alone is as likely as itself.
    assert run("generate", *PROMPTS, *words, "--temperature", "1", "--min-p", "1") == 0
    assert capsys.readouterr().out.split("\n\n")[:4] == texts
    assert run("generate", *PROMPTS, *words, "--repetition-penalty", "9") == 0
    assert capsys.readouterr().out.split("\n\n")[:4] != texts


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
