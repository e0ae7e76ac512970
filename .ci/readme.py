"""README.md is nbs/index.ipynb: `python .ci/readme.py` writes it, `--check` fails when the two differ."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "<!-- made from nbs/index.ipynb by .ci/readme.py: edit the notebook -->\n\n"


def text(lines) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def from_root(markdown: str) -> str:
    """Links and pictures that are relative to nbs/, made relative to the project's folder."""
    return re.sub(r"(\]\(|src=\")(?!https?:|#|mailto:|/)(\.\./)?", lambda m: m[1] + ("" if m[2] else "nbs/"), markdown)


def shown(cell: dict) -> list[str]:
    """What a reader sees of a cell: its text, or its code and the text it printed."""
    source = text(cell["source"])
    if cell["cell_type"] == "markdown":
        return [from_root(source)]
    if cell["cell_type"] != "code" or re.search(r"^#\| *(hide|include: *false)\s*$", source, re.MULTILINE):
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
    return HEADER + "\n\n".join(part.strip() for cell in cells for part in shown(cell) if part.strip()) + "\n"


if __name__ == "__main__":
    target, wanted = ROOT / "README.md", readme(ROOT / "nbs" / "index.ipynb")
    if "--check" not in sys.argv:
        target.write_text(wanted, "utf-8")
    elif target.read_text("utf-8") != wanted:
        sys.exit("README.md differs from nbs/index.ipynb: run `python .ci/readme.py`")
