"""Counts that show how dense the code is and how much of it is coupled, as JSON.

python .ci/measure.py [FOLDER]    counts the package of this checkout, or of the one in FOLDER"""

import ast
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "anchor_embedding"
LEFT_OUT = {"_modidx"}  # written by nbdev, not by us
# the module of the training loop and the one that prepares a run; older versions have only one
LOOP = ("training", "train.loop")
STAGE = ("training", "train.stage", "train.loop")


def read_modules(folder: Path) -> dict[str, str]:
    """Name inside the package → source."""
    files = sorted((folder / PACKAGE).rglob("*.py"))
    names = {
        path: ".".join(path.relative_to(folder / PACKAGE).with_suffix("").parts) for path in files
    }
    return {
        name: path.read_text("utf-8") for path, name in names.items() if path.stem not in LEFT_OUT
    }


def functions(tree: ast.AST) -> list[ast.AST]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def density(node: ast.AST, lines: list[str]) -> float:
    """Syntax nodes per non-blank line of a function."""
    own = [line for line in lines[node.lineno - 1 : node.end_lineno] if line.strip()]
    return sum(1 for _ in ast.walk(node)) / len(own)


def packed(node: ast.AST) -> bool:
    """`a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    )


def imported(name: str, tree: ast.AST, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, including imports inside functions."""
    parts = name.split(".")
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix(f"{PACKAGE}.")
                for alias in node.names
                if alias.name.startswith(f"{PACKAGE}.")
            }
        if isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level] if node.level else []
            module = ".".join(
                [*above, *(node.module or "").removeprefix(PACKAGE).strip(".").split(".")]
            ).strip(".")
            if node.level or (node.module or "").split(".")[0] == PACKAGE:
                found |= {module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)}
    return found & known


def reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    """A module and everything that it imports, directly or indirectly."""
    found = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports[name]
    return found


def code_lines(source: str) -> int:
    return sum(
        1 for line in source.splitlines() if line.strip() and not line.strip().startswith("#")
    )


def measure(folder: Path) -> dict:
    sources = read_modules(folder)
    trees = {name: ast.parse(source) for name, source in sources.items()}
    lines = [line for source in sources.values() for line in source.splitlines()]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    every = [
        (function, sources[name].splitlines())
        for name, tree in trees.items()
        for function in functions(tree)
    ]
    lengths = [node.end_lineno - node.lineno + 1 for node, _ in every]
    imports = {name: imported(name, tree, set(trees)) for name, tree in trees.items()}

    def imported_by(names):
        start = next(name for name in names if name in trees)
        others = reached(start, imports) - {start}
        return {
            "modules": len(others),
            "lines of code": sum(code_lines(sources[name]) for name in others),
        }

    return {
        "modules": len(trees),
        "statements and expressions": sum(isinstance(node, ast.stmt | ast.expr) for node in nodes),
        "nodes a line of a function, median": round(
            statistics.median(density(*each) for each in every), 1
        ),
        "lines over 100 columns, %": round(
            100 * sum(len(line) > 100 for line in lines) / len(lines), 1
        ),
        "lines over 120 columns, %": round(
            100 * sum(len(line) > 120 for line in lines) / len(lines), 1
        ),
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        "packed assignments": sum(map(packed, nodes)),
        "functions, median and longest": [statistics.median(lengths), max(lengths)],
        "imported by the training loop": imported_by(LOOP),
        "imported by a training run": imported_by(STAGE),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT), indent=1))
