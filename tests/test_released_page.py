"""The page "Released code, paper, here" names a test for every row, and each of these tests exists."""

import ast
import re

from notebook_checks import ROOT, joined, read_cells

PAGE = ROOT / "nbs" / "released_code.ipynb"
LINK = r"\]\(([\w/.-]+\.ipynb)#([\w.-]+)\)"
TEST = r"`(tests/\w+\.py)::(\w+)`"


def rows():
    """The cells of every row of the table."""
    lines = [
        line
        for cell in read_cells(PAGE)
        if cell["cell_type"] == "markdown"
        for line in joined(cell["source"]).splitlines()
    ]
    return [
        [part.strip() for part in line.strip("|").split("|")]
        for line in lines
        if re.match(r"\| *D\d", line)
    ]


def anchors(notebook):
    """The link anchors of a notebook's headings, as pandoc makes them."""
    text = "\n".join(
        joined(cell["source"]) for cell in read_cells(notebook) if cell["cell_type"] == "markdown"
    )
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s.-]", "", heading.lower())) for heading in headings}


def functions(path):
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def missing(guard):
    """The names in a guard that do not exist in the project."""
    links = [
        (name, anchor)
        for name, anchor in re.findall(LINK, guard)
        if anchor not in anchors(ROOT / "nbs" / name)
    ]
    named = re.findall(TEST, guard)
    return links + [
        (name, test)
        for name, test in named
        if not (ROOT / name).exists() or test not in functions(ROOT / name)
    ]


def test_there_is_one_row_for_each_difference():
    assert [row[0] for row in rows()] == [f"D{number}" for number in range(1, 24)]
    assert {len(row) for row in rows()} == {5} and all(all(row) for row in rows())


def test_every_row_names_a_test_that_exists():
    faults = {row[0]: missing(row[4]) for row in rows()}
    assert not {row: found for row, found in faults.items() if found}
    assert all(re.search(LINK, row[4]) or re.search(TEST, row[4]) for row in rows())


def test_a_name_that_does_not_exist_is_noticed():
    assert (
        missing(
            "[here](model/10_text.ipynb#proofs), "
            "`tests/test_released_page.py::test_there_is_one_row_for_each_difference`"
        )
        == []
    )
    assert missing(
        "[here](model/10_text.ipynb#no-such-heading), `tests/test_released_page.py::test_none`"
    ) == [
        ("model/10_text.ipynb", "no-such-heading"),
        ("tests/test_released_page.py", "test_none"),
    ]
