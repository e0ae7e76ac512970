"""A model is evaluated with the instructions and the wording that it was trained with; a user who
chooses others gets a message.
"""

import json
import os
from pathlib import Path

import pytest

from anchor_embedding.cli.main import main
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.embed.embedder import SETTINGS_FILE, Embedder
from anchor_embedding.evaluate.comparison import compare

WORDS = PROSE.split()
STS = "Retrieve semantically similar text"  # Table 13; mteb ends it with a full stop
TRAINED = "Instruct: {instruction}\nQuery: {text}"
RELEASED = "{instruction}: {text}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pairs to train on, a table of instructions, and three tasks: one of mteb's and two of the
    user's own.
    """
    folder = tmp_path_factory.mktemp("place")
    rows = [
        {
            "query": " ".join(WORDS[i : i + 5]),
            "positive": " ".join(WORDS[i + 5 : i + 17]),
            "dataset": ("pairs", "nq")[i % 4 // 2],
        }
        for i in range(0, 80, 2)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.csv").write_text(
        "dataset,instruction,symmetric\npairs,Find the next words,0\nmine,Find mine,1\n"
    )
    for name in ("STS17", "Mine", "Told"):
        task = folder / "tasks" / "sts" / name
        task.mkdir(parents=True)
        texts = [
            (f"{name} {' '.join(WORDS[i : i + 6])}", f"{name} {' '.join(WORDS[i + i % 5 : i + 6])}")
            for i in range(12)
        ]
        scored = [
            {"sentence1": one, "sentence2": other, "score": float(i % 5)}
            for i, (one, other) in enumerate(texts)
        ]
        (task / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    (folder / "tasks" / "sts" / "Told" / "meta.json").write_text(
        '{"instruction": "Find what is told"}'
    )
    return folder


def train(base, place, out, instructions, *more):
    small = [
        f"base={base}",
        f"data={place / 'pairs.jsonl'}",
        "batch_size=8",
        "max_length=40",
        "steps=1",
        "dtype=float32",
        "hard_negatives=0",
    ]
    given = [*small, f"instructions={instructions}", *more]
    return [
        "train",
        "stage2",
        *[word for item in given for word in ("--set", item)],
        "--out",
        str(out),
    ]


@pytest.fixture(scope="module")
def runs(base, place, tmp_path_factory):
    """A run for every kind of training, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "none": "none",
        "paper": "paper",
        "as_released": "as_released",
        "file": str(place / "own.csv"),
    }
    prompt = {"as_released": ["prompt={instruction}; {text}"]}
    for name, instructions in ways.items():
        assert main(train(base, place, folder / name, instructions, *prompt.get(name, []))) == 0
    return folder


@pytest.fixture
def asked(monkeypatch):
    """The prompts that the model gets, in order: (task, instruction, wording); the task is the
    first word of its texts.
    """
    found = []
    encode = Embedder.encode

    def listening(self, texts, instruction=None, *args, **options):
        found.append((texts[0].split()[0], instruction, self.tokenizer.prompt))
        return encode(self, texts, instruction, *args, **options)

    monkeypatch.setattr(Embedder, "encode", listening)
    return found


def prompts_of(asked, *words):
    """Task → its prompts, for a command that evaluates the three tasks."""
    asked.clear()
    assert main([*map(str, words), "--dtype", "float32", "--max-length", "64"]) == 0
    different = set(asked)
    found = {task: (instruction, wording) for task, instruction, wording in different}
    assert len(found) == len(different)
    return found


ASKED = {
    "none": {"STS17": (None, TRAINED), "Mine": (None, TRAINED), "Told": (None, TRAINED)},
    "paper": {
        "STS17": (STS, TRAINED),
        "Mine": (None, TRAINED),
        "Told": ("Find what is told", TRAINED),
    },
    "as_released": {
        "STS17": (STS, RELEASED),
        "Mine": (None, RELEASED),
        "Told": ("Find what is told", RELEASED),
    },
    "file": {
        "STS17": (STS + ".", TRAINED),
        "Mine": ("Find mine", TRAINED),
        "Told": ("Find what is told", TRAINED),
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_a_model_is_asked_as_it_was_trained(runs, place, asked, tmp_path, capsys, name):
    capsys.readouterr()
    found = prompts_of(
        asked, "eval", runs / name, "--tasks-dir", place / "tasks", "--out", tmp_path
    )
    assert found == ASKED[name]
    first = capsys.readouterr().err.splitlines()[0]
    # a table of its own says nothing of most tasks
    words = "where mteb has none" if name == "file" else ", as it was trained"
    assert first.startswith(f"== {name}: asked ") and words in first, first
    scores = json.loads((tmp_path / f"{name}-64-float32" / "scores.json").read_text())
    about = scores["about"]
    assert (about["prompts"], about["trained_with"], about["as_trained"]) == (name, name, True)
    assert scores["tasks"]["Mine"]["instructions"] == {"both": ASKED[name]["Mine"][0]}


def test_a_model_whose_data_had_no_instruction_is_asked_without(base, place, tmp_path):
    """The table of the paper names none of one's own datasets."""
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    own = "".join(json.dumps(row | {"dataset": "own"}) + "\n" for row in rows)
    (tmp_path / "pairs.jsonl").write_text(own)
    assert main(train(base, tmp_path, tmp_path / "run", "paper")) == 0
    saved = json.loads((tmp_path / "run" / "final" / SETTINGS_FILE).read_text())
    assert saved["instructions"] == "none"
    assert json.loads((tmp_path / "run" / "card.json").read_text())["instructions"] == "none"


def test_a_model_that_says_nothing_gets_mtebs_instructions(base, place, asked, tmp_path, capsys):
    """A task of the user's own gets the instructions of its kind only on request."""
    words = ("eval", base, "--tasks-dir", place / "tasks", "--out", tmp_path)
    assert prompts_of(asked, *words) == {
        "STS17": (STS + ".", TRAINED),
        "Mine": (None, TRAINED),
        "Told": ("Find what is told", TRAINED),
    }
    assert "nothing tells what it was trained with" in capsys.readouterr().err.splitlines()[0]
    found = prompts_of(asked, *words, "--prompts", "mteb")
    assert found["Mine"] == (STS + ".", TRAINED)
    for name in ("paper", "as_released", "none"):
        assert prompts_of(asked, *words, "--prompts", name)["Mine"][0] is None


def test_what_was_asked_otherwise_is_said_and_kept_apart(runs, place, asked, tmp_path, capsys):
    words = ("eval", runs / "none", "--tasks-dir", place / "tasks", "--out", tmp_path)
    prompts_of(asked, *words)
    before = (tmp_path / "none-64-float32" / "scores.json").read_bytes()
    capsys.readouterr()
    assert prompts_of(asked, *words, "--prompts", "paper")["STS17"] == (STS, TRAINED)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(
        "== none: asked with prompts = paper, but trained with instructions = none"
    ), first
    other = tmp_path / "none-paper-64-float32" / "scores.json"
    about = json.loads(other.read_text())["about"]
    assert (about["prompts"], about["trained_with"], about["as_trained"]) == (
        "paper",
        "none",
        False,
    )
    assert (tmp_path / "none-64-float32" / "scores.json").read_bytes() == before
    capsys.readouterr()
    two = [str(tmp_path / "none-64-float32"), str(other)]
    assert main(["compare", *two, "--paper", "Llama-3.2-1B-Instruct"]) == 0
    shown = capsys.readouterr().out
    assert (
        "Scored with prompts paper but trained with instructions none" in shown
        and "none-paper-64-float32" in shown
    )
    # a task without an instruction is asked as in training
    content = [
        json.loads((tmp_path / name / "scores.json").read_text())
        for name in os.listdir(tmp_path)
        if name.startswith("none")
    ]
    for scores in content:
        scores["tasks"] = {"Mine": scores["tasks"]["Mine"]}
    assert "are new to the model" not in str(compare(content, None))
    # requested by name, as it was trained, so everything is known
    assert prompts_of(asked, *words, "--prompts", "none") == {}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("none")) == [
        "none-64-float32", "none-paper-64-float32"]  # fmt: skip


@pytest.mark.parametrize("name", ["none", "file"])
def test_the_instructions_go_where_the_model_goes(runs, place, asked, tmp_path, name):
    """The prompts go into an export and its own folder, but not into what is trained on it."""
    words = ["export", str(runs / name), "--out", str(tmp_path / "exported")]
    assert main(words) == 0
    prompts = json.loads((tmp_path / "exported" / "config_sentence_transformers.json").read_text())[
        "prompts"
    ]
    query = {"none": "", "file": "Instruct: Find the next words\nQuery: "}[name]
    assert prompts == {"query": query, "document": ""}
    words[-1] = str(tmp_path / "chosen")
    assert main([*words, "--instruction", "Find it"]) == 0
    chosen = json.loads((tmp_path / "chosen" / "config_sentence_transformers.json").read_text())
    assert chosen["prompts"]["query"] == "Instruct: Find it\nQuery: "
    (place / "own.csv").rename(place / "moved.csv")
    try:
        found = prompts_of(
            asked,
            "eval",
            tmp_path / "exported",
            "--tasks-dir",
            place / "tasks",
            "--out",
            tmp_path / "scores",
        )
    finally:
        (place / "moved.csv").rename(place / "own.csv")
    assert found == ASKED[name]
    Embedder.from_pretrained(runs / name, dtype="float32").save_pretrained(tmp_path / "again")
    settings = [
        json.loads((folder / SETTINGS_FILE).read_text())
        for folder in (runs / name / "final", tmp_path / "exported", tmp_path / "again")
    ]
    for key in ("instructions", "datasets"):
        first, *others = (saved.get(key) for saved in settings)
        assert others == [first, first]
    assert settings[0].get("datasets") == {"none": None, "file": ["pairs"]}[name]
    assert main(train(runs / name, place, tmp_path / "next", "paper")) == 0
    assert (
        json.loads((tmp_path / "next" / "final" / SETTINGS_FILE).read_text())["instructions"]
        == "paper"
    )


@pytest.mark.parametrize("name", ["none", "paper"])
def test_scores_in_training_are_asked_as_it_trains(base, place, asked, tmp_path, name):
    words = train(base, place, tmp_path / "run", name, "eval_every=1", "checkpoint_every=1")
    assert main([*words, "--eval-tasks", "STS17", "--tasks-dir", str(place / "tasks")]) == 0
    assert set(asked) == {("STS17", *ASKED[name]["STS17"])}
    asked.clear()
    assert (
        main(
            [
                "sweep",
                str(tmp_path / "run"),
                "--tasks",
                "STS17",
                "--tasks-dir",
                str(place / "tasks"),
                "--prompts",
                name,
            ]
        )
        == 0
    )
    assert set(asked) == {("STS17", *ASKED[name]["STS17"])}
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
    ]
    assert all("prompts" not in line for line in lines)
    assert (
        main(
            [
                "sweep",
                str(tmp_path / "run"),
                "--tasks",
                "STS17",
                "--tasks-dir",
                str(place / "tasks"),
                "--prompts",
                "as_released",
            ]
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])["prompts"]
        == "as_released"
    )


def test_settings_that_make_no_sense_are_refused(runs, place, tmp_path, capsys):
    Embedder.from_pretrained(runs / "none", dtype="float32").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / SETTINGS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"instructions": "some"}))
    capsys.readouterr()
    assert (
        main(
            [
                "eval",
                str(tmp_path / "model"),
                "--tasks-dir",
                str(place / "tasks"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    assert (
        "instructions = 'some', which is not known here; save it again" in capsys.readouterr().err
    )


def asked_otherwise(record):
    """Whether a record has task scores with instructions unlike those of the training, or unknown
    ones.
    """
    models = [
        model["about"]
        for model in dict(record.get("models", {})).values()
        if "recipe" in model.get("about", {})
    ]
    runs = record["runs"].values() if isinstance(record.get("runs"), dict) else ()
    lines = [line for run in runs if isinstance(run, dict) for line in run.get("evals", [])]
    return any(about["prompts"] != about["recipe"]["instructions"] for about in models) or (
        any("task" in line for line in lines) and "prompts" not in record["about"]
    )


def test_no_shown_figure_was_asked_otherwise_than_its_model_was_trained():
    """A score with instructions that a model was not trained with says little about the model."""
    folder = Path(__file__).parent.parent / "nbs" / "results"
    records = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    records = {name: record for name, record in records.items() if isinstance(record, dict)}
    assert {"mteb_smollm2.json", "early_stage_smollm2.json"} <= records.keys()
    assert [name for name, record in records.items() if asked_otherwise(record)] == []
    found = records["mteb_smollm2.json"]["models"]
    assert {model["about"]["prompts"] for model in found.values()} == {"none"}
    found["anchor"]["about"]["prompts"] = "paper"
    assert asked_otherwise(records["mteb_smollm2.json"])
