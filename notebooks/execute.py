"""Run notebooks from top to bottom and store what they print and draw.

    python notebooks/execute.py [notebooks/04_speed.ipynb ...]

Without arguments, all of them. Plain Python, no Jupyter: a cell's prints and the figures that it opens
are its outputs, and nothing of the machine is stored.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib
from collections.abc import Iterator

os.environ.setdefault("MPLBACKEND", "Agg")

import matplotlib.pyplot as plt

FOLDER = pathlib.Path(__file__).parent


def run(notebook: dict, namespace: dict) -> Iterator[tuple[dict, str, list[bytes]]]:
    """Run the code cells in `namespace`: each cell, what it printed, and its figures as PNG."""
    namespace["__name__"] = "__main__"
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        pictures = []
        for figure in map(plt.figure, plt.get_fignums()):
            with io.BytesIO() as file:
                figure.savefig(file, format="png", dpi=figure.dpi, bbox_inches="tight")
                pictures.append(file.getvalue())
        plt.close("all")
        yield cell, printed.getvalue(), pictures


def execute(path: pathlib.Path) -> None:
    """Run a notebook and store its outputs in it."""
    notebook = json.loads(path.read_text())
    for number, (cell, printed, pictures) in enumerate(run(notebook, {}), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(True)}
        cell["execution_count"] = number
        cell["outputs"] = [stream] if printed else []
        for picture in pictures:
            data = {"image/png": base64.b64encode(picture).decode() + "\n"}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Run the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=pathlib.Path)
    for path in parser.parse_args().paths or sorted(FOLDER.glob("*.ipynb")):
        execute(path)
        print(path)


if __name__ == "__main__":
    main()
