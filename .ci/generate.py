"""Generates README.md from nbs/index.ipynb, and the sidebar's list in _quarto.yml from the files in nbs/.

`--check` writes nothing and fails if one of them is out of date."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINGS = {  # folder below nbs/ → its title, lowest first
    "common": "Common",
    "model": "Model",
    "data": "Data",
    "objectives": "Objectives",
    "embed": "Embed",
    "train": "Train",
    "evaluate": "Evaluate",
    "study": "Study",
    "cli": "Command line",
}
HEADER = "<!-- made from nbs/index.ipynb by .ci/generate.py: edit the notebook -->\n\n"


def text(lines) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def from_root(markdown: str) -> str:
    """Makes links and pictures that are relative to nbs/ relative to the project's folder."""
    return re.sub(
        r"(\]\(|src=\")(?!https?:|#|mailto:|/)(\.\./)?",
        lambda m: m[1] + ("" if m[2] else "nbs/"),
        markdown,
    )


def shown(cell: dict) -> list[str]:
    """The parts of a cell that a reader sees: its text, or its code and output."""
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
    """A printed or displayed text; Markdown stays as it is."""
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
    """The sidebar's contents: the index, the guide, the experiments, other pages, the wings; each
    folder's own index comes first.
    """
    pages = sorted(folder.glob("[a-z]*.ipynb"))
    pages.remove(folder / "index.ipynb")
    lines = ["      - index.ipynb"]
    sections = {"guide": "Guide", "experiments": "Experiments", "": "", **WINGS}
    for name, title in sections.items():
        if not name:
            lines += [f"      - {path.name}" for path in pages]
            continue
        notebooks = sorted(
            (folder / name).glob("*.ipynb"), key=lambda path: (path.stem != "index", path.name)
        )
        lines += [f"      - section: {title}", "        contents:"]
        lines += [f"          - {path.relative_to(folder)}" for path in notebooks]
    return "\n".join(lines) + "\n"


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
