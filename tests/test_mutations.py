"""The list of faults still fits the rooms, and every fault made a test fail."""

import json
import re

import pytest
from mutations import (
    RESULTS,
    ROOT,
    Fault,
    changed,
    changed_notebook,
    entry_of,
    key_of,
    places,
    read_faults,
    without_folders,
)

FAULTS = read_faults()


@pytest.mark.thorough
def test_every_fault_applies_once_and_is_python():
    assert len(FAULTS) >= 100
    assert len({(fault.room, fault.before, fault.after) for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert len(places(fault)) == 2


def test_every_test_that_should_die_is_there():
    for file, _, name in {fault.test.partition("::") for fault in FAULTS}:
        source = (ROOT / file).read_text("utf-8")
        assert not name or re.search(rf"^def {name}\(", source, re.MULTILINE), (file, name)


def test_no_fault_that_was_tried_lives():
    """Each result belongs to a fault of the list and has the commit at which it was tried."""
    found = json.loads(RESULTS.read_text("utf-8"))
    wanted = {key_of(entry_of(fault)) for fault in FAULTS}
    for entry in found["faults"]:
        assert key_of(entry) in wanted, entry["fault"]
        assert entry["killed_by"] and entry["seconds"] > 0, entry["fault"]
        assert re.fullmatch(r"[0-9a-f]{12}", entry["commit"]), entry["fault"]
    about = found["about"]
    assert about["faults"] == len(FAULTS) and about["killed"] == len(found["faults"])


MODULE = "def double(x):\n    return x + x\n"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("x - x", "x", "0 times"),
        ("x", "y", "3 times"),
        ("x + x", "x +", "invalid syntax"),
        ("x + x", "(x + x)", "changes nothing"),
        ("return x + x", "return x\n    pass", "1 times"),
    ],
)
def test_what_does_not_apply_is_refused(before, after, why):
    with pytest.raises(ValueError, match=why):
        changed(Fault("room", "a fault", before, after, "tests/test_x.py"), MODULE)


def test_a_fault_is_put_into_the_exported_cell_alone():
    sources = ["#| export\n" + MODULE, "assert double(2) == 2 + 2 and 'x + x'"]
    cells = [{"cell_type": "code", "source": source, "outputs": []} for source in sources]
    fault = Fault("room", "a fault", "x + x", "x * x", "nbs/x.ipynb")
    faulty = json.loads(changed_notebook(fault, json.dumps({"cells": cells})))
    assert [cell["source"] for cell in faulty["cells"]] == [
        sources[0].replace("x + x", "x * x"),
        sources[1],
    ]


def test_why_a_test_died_names_no_folder_of_a_machine():
    said = "E TimeoutExpired: Command '['/some/where/bin/python', '-m', 'a/b']' in 3 / 4 s"
    wanted = "E TimeoutExpired: Command '['python', '-m', 'a/b']' in 3 / 4 s"
    assert without_folders(said) == wanted
