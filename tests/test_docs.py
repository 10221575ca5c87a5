"""The guides' code runs, the reference holds everything public, and docstrings name what there is."""

import importlib
import inspect
import json
import os
import pathlib
import re

import jax
import pytest

import paged_kv_jax as pkv

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
SNIPPET = "--8<--"
GUIDES = sorted((DOCS / "guides").glob("*.md"))


def listings(path: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(
    not os.environ.get("TEST_DOCS"),
    reason="takes a while, and one run of CI does it: set TEST_DOCS=1",
)
@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guides_listings_run_from_top_to_bottom(path):
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for number, listing in enumerate(listings(path), 1):
            if SNIPPET not in listing:
                exec(compile(listing, f"{path.name}, listing {number}", "exec"), names)


def test_included_snippets_are_sections_of_files_that_tests_run():
    included = re.findall(rf'{SNIPPET} "(.+?):(.+?)"', "".join(map(pathlib.Path.read_text, GUIDES)))
    assert len(included) >= 5
    for file, section in included:
        text = (ROOT / file).read_text()
        assert file.startswith("examples/")
        assert f"# {SNIPPET} [start:{section}]" in text, (file, section)
        assert f"# {SNIPPET} [end:{section}]" in text, (file, section)


def reference() -> list[str]:
    pages = (DOCS / "reference").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def test_everything_public_is_in_the_reference_once():
    listed = reference()
    assert len(set(listed)) == len(listed)
    public = {f"paged_kv_jax.{name}" for name in pkv.__all__ if name != "__version__"}
    assert public <= set(listed), f"add to docs/reference: {sorted(public - set(listed))}"


def resolve(path: str) -> object:
    module, names = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        found = getattr(found, name)
    return found


def functions(thing: object, path: str) -> list[tuple[str, object]]:
    """The function itself, a class's public methods, a module's public functions and classes."""
    if inspect.isfunction(thing):
        return [(path, thing)]
    if inspect.isclass(thing):
        own = [(f"{path}.{name}", member) for name, member in vars(thing).items()]
    elif inspect.ismodule(thing):
        own = [
            (f"{path}.{name}", member)
            for name, member in vars(thing).items()
            if getattr(member, "__module__", None) == thing.__name__ and not name.startswith("_")
        ]
        return [pair for name, member in own for pair in functions(member, name)]
    else:
        return []
    return [
        (name, inspect.unwrap(getattr(member, "__func__", member)))
        for name, member in own
        if inspect.isfunction(getattr(member, "__func__", member))
        and (not name.rpartition(".")[2].startswith("_") or name.endswith(("__init__", "__call__")))
    ]


def test_docstrings_name_the_parameters_that_there_are():
    pytest.importorskip("matplotlib")
    checked = 0
    for path in reference():
        for name, function in functions(resolve(path), path):
            doc = inspect.getdoc(function) or ""
            section = re.search(r"^Args:\n((?:  .*\n?|\n)+)", doc, re.MULTILINE)
            if section is None:
                continue
            # An entry starts at the section's own indentation; "k, v: [T, K, D]" names two.
            named = re.findall(r"^  ([*\w][\w*, ]*):", section.group(1), re.MULTILINE)
            described = {part.strip(" *") for entry in named for part in entry.split(",")}
            actual = set(inspect.signature(function).parameters) - {"self", "cls"}
            if described == {"name", "q", "pool", "plan", "options"}:  # as for another function
                continue
            assert described == actual, f"{name} describes {described} and takes {actual}"
            checked += 1
    assert checked > 40


def test_the_numbers_about_the_prefix_index_are_those_of_the_benchmark():
    page = (DOCS / "prefix_index.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "allocator_cpu.json").read_text())
    times = dict(kept["admission_us"])
    quoted = re.findall(r"^\| .+ \| ([\d,]+) \|$", page, re.MULTILINE)
    measured = [
        times[f"{what}, 64 prompts of 4096 tokens"]
        for what in ("match", "match in Python", "admit and free", "admit, fork and free both")
    ]
    for text, time in zip(quoted, measured, strict=True):
        assert abs(int(text.replace(",", "")) / time - 1) < 0.05, (text, time)
    ratio = float(re.search(r"is ([\d.]+) times as fast", page).group(1))
    assert abs(ratio / (measured[1] / measured[0]) - 1) < 0.05
