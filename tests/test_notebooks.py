"""The notebooks' code runs and arrives at what their text says; what is stored of them is clean.

01 to 03 take a minute: they run where TEST_DOCS is set, as in one run of CI, and are only compiled and
looked through elsewhere. SmolLM2 has four of its thirty layers then, so its texts are not compared.
"""

import ast
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pathlib
import re

import execute
import jax
import matplotlib as mpl
import numpy as np
import pytest
from flax import nnx

import paged_kv_jax as pkv
from paged_kv_jax import models

mpl.use("Agg")

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
WITH_A_MODEL = [FOLDER / "02_decode_loop.ipynb", FOLDER / "03_prefix_reuse_and_samples.ipynb"]
runs_once = pytest.mark.skipif(
    not os.environ.get("TEST_DOCS"),
    reason="takes a while, and one run of CI does it: set TEST_DOCS=1",
)
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: pathlib.Path, kind: str = "code") -> list[dict]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def sources(path: pathlib.Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(path)]


def run(path: pathlib.Path, names: dict, changes: dict[str, str] | None = None) -> tuple[str, int]:
    """What a notebook prints, and how many pictures it draws; `names` gets what it defines."""
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        for before, after in (changes or {}).items():
            cell["source"] = [line.replace(before, after) for line in cell["source"]]
    with jax.numpy_dtype_promotion("standard"):
        outputs = [(text, len(pictures)) for _, text, pictures in execute.run(notebook, names)]
    return "".join(text for text, _ in outputs), sum(count for _, count in outputs)


def stored(path: pathlib.Path) -> tuple[str, int]:
    """The same of its stored outputs."""
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    text = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_blocks_and_tables",
        "02_decode_loop",
        "03_prefix_reuse_and_samples",
        "04_speed",
    ]


@runs_once
def test_blocks_and_tables_arrives_at_what_it_prints():
    names = {}
    out, num_pictures = run(NOTEBOOKS[0], names)
    # A plan of 12, 16 and 9 tokens; B's keys are its positions, read back through its table.
    assert "cu_q_lens [ 0 12 28 37]" in out
    assert f"B, read through its table: {np.arange(16)}" in out
    # D takes the four blocks that B left and one more.
    assert "D's table: [ 8  4  3  2 10 -1 -1 -1]" in out
    assert "result: [3, 'OUT_OF_BLOCKS', 0]" in out
    assert "broken invariants: []" in out
    assert int(names["states"].seq_lens[-1].sum()) == 48  # C alone is left
    owners = [np.flatnonzero((table == 3).any(1)).tolist() for table in names["states"].block_table]
    in_turn = [owners[0]] + [b for a, b in itertools.pairwise(owners) if a != b]
    assert [seq_ids for seq_ids in in_turn if seq_ids] == [[1], [3], [5], [2]]  # B, D, F, C
    assert (out, num_pictures) == stored(NOTEBOOKS[0])


@functools.cache
def first_layers(name: str) -> models.LoadedModel:
    """The model with four of its layers: compiled in seconds."""
    loaded = models.load_model(name)
    config = dataclasses.replace(loaded.config, num_layers=4)
    loaded.model.layers = nnx.List(list(loaded.model.layers)[:4])
    loaded.model.config = config
    return models.LoadedModel(loaded.model, config, loaded.tokenizer)


@runs_once
def test_the_notebooks_with_a_model_run():
    """In one test, so that the model is loaded once."""
    for path in WITH_A_MODEL:
        names = dict(load_shortened=first_layers)
        out, num_pictures = run(path, names, {
            "loaded = load_model(": "loaded = load_shortened(",
            # Four layers do not know when to stop, and the pool is no larger than it must be.
            "max_new_tokens = 32": "max_new_tokens = 8",
        })  # fmt: skip
        text, stored_pictures = stored(path)
        assert num_pictures == stored_pictures
        assert counts(out) == counts(text)
    assert "found of B, C, D: [96 96 96] tokens" in counts(out)
    assert "broken invariants: []" in out


def counts(out: str) -> str:
    """The lines about tokens, blocks and what the index holds."""
    lines = out.splitlines()
    return "\n".join(line for line in lines if re.search("tokens[;:]|taken|found of|held", line))


@by_name
def test_a_notebook_compiles_and_what_it_imports_exists(path):
    for number, source in enumerate(sources(path)):
        compile(source, f"code cell {number}", "exec")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pkv":
                assert hasattr(pkv, node.attr)


def test_the_speed_notebook_draws_what_is_kept():
    out, num_pictures = run(NOTEBOOKS[3], {})
    kept = (FOLDER.parent / "benchmarks" / "results").glob("*.json")
    assert out.splitlines()[0].split() == sorted(path.stem for path in kept)
    assert num_pictures >= 6


def test_the_speed_notebook_takes_new_kinds_of_results(tmp_path, monkeypatch):
    """Prefill in TFLOP/s, a prefix that rows share, writes, failures, and a file of another kind."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    head = dict(
        environment=dict(gpu="a GPU", jax="1.0", command="a command", date="2026-12-02T10:00"),
        ceilings=dict(read=4.6, copy=4.3),
    )
    cell = dict(num_heads=32, num_kv_heads=8, head_dim=128, kv_lens="4096 x 2", q_lens="4096 x 2")
    decode = cell | dict(name="decode", q_lens="1 x 2")
    skewed = cell | dict(name="skewed", kv_lens="100, 7", q_lens="1, 1")
    prefill, shared = cell | dict(name="prefill"), decode | dict(name="shared", shared=2048)
    records = dict(
        attention_decode=[
            dict(cell=decode, name="flashinfer", time_us=9.0, tb_per_s=3.7, plan_us=500),
            dict(cell=decode, name="mosaic_gpu", time_us=8.0, tb_per_s=4.2),
            dict(cell=skewed, name="mosaic_gpu", time_us=2.0, tb_per_s=0.2),
            dict(cell=skewed, name="flashinfer", error="RuntimeError: refused"),
        ],
        attention_prefill=[
            dict(cell=prefill, name="mosaic_gpu", time_us=900.0, tflop_per_s=610.0),
            dict(cell=prefill, name="xla", time_us=9000.0, tflop_per_s=61.0),
        ],
        attention_cascade=[
            dict(cell=shared, name="mosaic_gpu", time_us=9.0),
            dict(cell=shared, name="mosaic_gpu cascade", time_us=3.0),
        ],
        write=[dict(cell="write 256 tokens", name="mosaic_gpu", time_us=2.0, tb_per_s=1.0)],
        nothing=[dict(cell=decode, name="mosaic_gpu", error="it failed")],
    )
    for stem, entries in records.items():
        (results / f"{stem}.json").write_text(json.dumps(head | dict(results=entries)))
    rows = dict(
        cascade_cpu=[dict(cell="B2", plain_ms=3.0, cascade_ms=1.0, speedup=3.0)],
        serving_cpu=[
            dict(
                lengths="even",
                server_tokens_per_second=9.0,
                static_tokens_per_second=4.0,
                ratio=2.3,
            )
        ],
    )
    for stem, entries in rows.items():
        (results / f"{stem}.json").write_text(json.dumps(dict(hardware="a CPU", rows=entries)))
    server = dict(decode_step_ms=15.0, decode_floor_ms=13.5)
    (results / "serving_gpu.json").write_text(json.dumps(head | dict(server=server)))
    (results / "other.json").write_text(json.dumps(dict(requests_per_s=3)))
    monkeypatch.chdir(tmp_path)
    out, num_pictures = run(NOTEBOOKS[3], {})
    # Decode, prefill, cascade, write and the roofline; then the two of `rows`, and the server.
    assert num_pictures == 5 + 2 + 1
    assert "attention_decode: flashinfer on skewed: RuntimeError: refused" in out
    assert out.endswith("results without a chart here: ['nothing', 'other']\n")


@by_name
def test_a_notebook_is_stored_small_executed_and_without_traces_of_a_machine(path):
    text = path.read_text()
    assert len(text) < 400_000
    assert json.loads(text)["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    executed = [cell["execution_count"] for cell in cells(path)]
    assert executed == list(range(1, len(executed) + 1))
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)  # no warnings
    printed, num_pictures = stored(path)
    assert num_pictures >= 3
    assert not re.search(r"/(home|root|tmp|work|Users)/|[Ww]arning", printed)


@by_name
def test_links_between_notebooks_lead_somewhere(path):
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).is_file(), target
