"""Writes what follows from the notebooks: README.md (which is nbs/index.ipynb) and the sidebar's list in _quarto.yml.

`--check` writes nothing and fails when one of them is out of date."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "<!-- made from nbs/index.ipynb by .ci/generate.py: edit the notebook -->\n\n"


def text(lines) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def from_root(markdown: str) -> str:
    """Links and pictures that are relative to nbs/, made relative to the project's folder."""
    return re.sub(
        r"(\]\(|src=\")(?!https?:|#|mailto:|/)(\.\./)?",
        lambda m: m[1] + ("" if m[2] else "nbs/"),
        markdown,
    )


def shown(cell: dict) -> list[str]:
    """What a reader sees of a cell: its text, or its code and the text it printed."""
    source = text(cell["source"])
    if cell["cell_type"] == "markdown":
        return [from_root(source)]
    if cell["cell_type"] != "code" or re.search(
        r"^#\| *(hide|include: *false)\s*$", source, re.MULTILINE
    ):
        return []
    code = re.sub(r"^#\|.*\n?", "", source, flags=re.MULTILINE).strip()
    hidden = re.search(r"^#\| *echo: *false\s*$", source, re.MULTILINE)
    return [*([] if hidden else [f"```python\n{code}\n```"]), *map(output, cell["outputs"])]


def output(out: dict) -> str:
    """A printed or displayed text; Markdown as it is."""
    data = out.get("data", {})
    if "text/markdown" in data:
        return from_root(text(data["text/markdown"]))
    plain = text(out.get("text") or data.get("text/plain", "")).strip()
    return f"```text\n{plain}\n```" if plain else ""


def readme(notebook: Path) -> str:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return (
        HEADER
        + "\n\n".join(part.strip() for cell in cells for part in shown(cell) if part.strip())
        + "\n"
    )


def sidebar(folder: Path) -> str:
    """The sidebar's contents: the index, the guide, other pages, the rooms, then the notebooks of
    each other folder.
    """
    pages = sorted(
        folder.glob("[a-z]*.ipynb"), key=lambda path: (path.name != "index.ipynb", path.name)
    )
    sections = {
        "Guide": sorted(folder.glob("guide/*.ipynb")),
        "The rooms": sorted(folder.glob("[0-9]*.ipynb")),
    }
    for path in sorted(folder.glob("[a-z]*/")):
        sections.setdefault(path.name.capitalize(), sorted(path.glob("*.ipynb")))
    lines = []
    for name, notebooks in sections.items():
        if name == "The rooms":
            lines += [f"      - {path.name}" for path in pages[1:]]
        if notebooks:
            lines += [f"      - section: {name}", "        contents:"]
            lines += [f"          - {path.relative_to(folder)}" for path in notebooks]
    return "\n".join([f"      - {pages[0].name}", *lines]) + "\n"


def site(quarto: str, folder: Path) -> str:
    """_quarto.yml with an up-to-date sidebar."""
    return re.sub(r"(?m)(?<=^    contents:\n)(?: {6,}.*\n)+", sidebar(folder), quarto)


if __name__ == "__main__":
    wanted = {
        ROOT / "README.md": readme(ROOT / "nbs" / "index.ipynb"),
        ROOT / "_quarto.yml": site((ROOT / "_quarto.yml").read_text("utf-8"), ROOT / "nbs"),
    }
    old = [path for path in wanted if not path.exists() or path.read_text("utf-8") != wanted[path]]
    if "--check" not in sys.argv:
        for path in old:
            path.write_text(wanted[path], "utf-8")
    elif old:
        sys.exit(f"out of date: {', '.join(path.name for path in old)} (run `.ci/prepare`)")
