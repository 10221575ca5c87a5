"""What the site takes from the rest of the repository: README sections, notebooks, benchmark results.

A page shows a section of the README with a line `{{ README: Its heading }}`. Each notebook becomes a
page with its stored outputs and pictures, each table in benchmarks/results a page of its own.
"""

import base64
import json
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        text = path.read_text()
        if not text.startswith("# "):
            text = f"# {path.stem}\n\n{text}"
        _add(files, config, f"results/{path.name}", text)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(json.loads(path.read_text()), path.stem)
        _add(files, config, f"notebooks/{path.stem}.md", text)
        for name, picture in pictures.items():
            _add(files, config, f"notebooks/{name}", picture)
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the README's sections in."""
    return re.sub(r"^\{\{ README: (.+) \}\}$", _readme_section, markdown, flags=re.MULTILINE)


def notebook_page(notebook: dict, stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\.ipynb\)", ".md)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output["data"]:
                name = f"{stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![picture {len(pictures)}]({name})")
    return "\n\n".join(parts) + "\n", pictures


def _add(files: Files, config: MkDocsConfig, uri: str, content: str | bytes) -> None:
    files.append(File.generated(config, uri, content=content))


def _readme_section(match: re.Match) -> str:
    heading = match.group(1)
    readme = (ROOT / "README.md").read_text()
    section = re.search(
        rf"^## {re.escape(heading)}\n(.+?)(?=^## |\Z)", readme, re.DOTALL | re.MULTILINE
    )
    if section is None:
        raise ValueError(f"the README has no section {heading!r}")
    text = re.sub(r"^\[CHANGELOG\].*", "", section.group(1), flags=re.MULTILINE).strip()
    text = re.sub(r"\]\(benchmarks/(results/\w+\.md)\)", r"](\1)", text)
    text = re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", text)
    # Links to other files have no page here.
    return re.sub(r"\[([^\]]+)\]\((?!results/|notebooks/)[^)]+\)", r"\1", text)
