"""The notebooks' code runs and arrives at what their text says; what is stored of them is clean."""

import ast
import importlib
import itertools
import json
import pathlib
import re

import jax
import matplotlib as mpl
import numpy as np
import pytest

import paged_kv_jax as pkv

mpl.use("Agg")
import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: pathlib.Path, kind: str = "code") -> list[dict]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def sources(path: pathlib.Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(path)]


def run(path: pathlib.Path) -> dict:
    namespace = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for number, source in enumerate(sources(path)):
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
            plt.close("all")
    return namespace


def printed(path: pathlib.Path) -> str:
    """What the stored outputs print."""
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    return "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == [
        "01_blocks_and_tables.ipynb",
        "02_decode_loop.ipynb",
    ]


def test_blocks_and_tables_arrives_at_what_it_prints(capsys):
    names = run(NOTEBOOKS[0])
    out = capsys.readouterr().out
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
    assert printed(NOTEBOOKS[0]) == out


def test_the_decode_loop_compiles_and_what_it_imports_exists():
    """Not run, since it compiles the model four times; `generate`'s own tests run such loops."""
    for number, source in enumerate(sources(NOTEBOOKS[1])):
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
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not re.search(r"/(home|root|tmp|work|Users)/|[Ww]arning", printed(path))


@by_name
def test_links_between_notebooks_lead_somewhere(path):
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).is_file(), target
