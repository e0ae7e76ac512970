"""Task sets, instructions, and tasks read from plain files."""

import gzip
import json
import os
from pathlib import Path

import pytest

from anchor_embedding.common.errors import InputError
from anchor_embedding.evaluate.local_tasks import (
    data_fingerprint,
    open_tasks,
    task_size,
)
from anchor_embedding.evaluate.prompts import (
    PROMPTS,
    choose_style,
    gets_instruction,
    paper_instruction,
)
from anchor_embedding.evaluate.tasks import (
    find_tasks,
    split_names,
    subset15,
)

REAL = Path(os.environ["ANCHOR_DATA"]) / "eval" if os.environ.get("ANCHOR_DATA") else None
needs_data = pytest.mark.skipif(
    REAL is None or not REAL.is_dir(),
    reason="real tasks: set ANCHOR_DATA to the folder that holds eval/",
)
PAIR = {"sentence1": "a cat", "sentence2": "the cat", "score": 4.5}
OTHER_PAIR = PAIR | {"score": 1.0}
DOCUMENTS = [{"_id": f"d{i}", "title": "", "text": f"text {i}"} for i in range(3)]


def task_instruction(metadata, side, prompts="paper"):
    return choose_style(prompts).instruction(metadata, side)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder, **files):
    """Rows as JSONL, or text as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        name, text = (
            (f"{stem}.tsv", content)
            if stem == "qrels"
            else (f"{stem}.jsonl", content if isinstance(content, str) else lines(content))
        )
        (folder / name).write_text(text)
    return folder


def local_tasks(folder, names=None):
    """All tasks of a folder, or raises the first one's error."""
    tasks = list(open_tasks(names, folder).values())
    for task in tasks:
        if isinstance(task, InputError):
            raise task
    return tasks


def fault(folder):
    """The one sentence with which a task refuses its data."""
    with pytest.raises(InputError) as error:
        for task in local_tasks(folder):
            task.load_data()
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


# ---- sets and instructions


def test_the_subset_is_of_the_benchmark_and_in_the_papers_categories():
    of_mteb = {
        "retrieval": "Retrieval",
        "reranking": "Reranking",
        "clustering": "Clustering",
        "pair_classification": "PairClassification",
    }
    of_mteb |= {"classification": "Classification", "sts": "STS"}
    tasks = find_tasks("subset15")
    assert {task.metadata.name: task.metadata.type for task in tasks} == {
        name: of_mteb[kind] for name, kind in subset15().items()
    }
    benchmark = {task.metadata.name: task for task in find_tasks("MTEB(eng, v1)")}
    for task in tasks:
        same = benchmark[task.metadata.name]
        assert (list(task.eval_splits), task.hf_subsets) == (
            list(same.eval_splits),
            same.hf_subsets,
        )
        assert len(task.hf_subsets) == len(task.eval_splits) == 1


def test_names_are_split_at_commas_that_are_not_theirs():
    assert split_names(" STS17 ,MTEB(eng, v1),, STS12") == ["STS17", "MTEB(eng, v1)", "STS12"]
    assert split_names(["MTEB(eng, v2)", "STS17,STS17"]) == ["MTEB(eng, v2)", "STS17"]
    for nothing in ("", " , ", []):
        with pytest.raises(InputError, match="no task is named"):
            split_names(nothing)


def test_every_task_has_the_sides_it_should():
    """Queries and both sides of symmetric tasks get the instruction; documents get it only if they
    are questions too.
    """
    instructed = {}
    for task in find_tasks("MTEB(eng, v1)"):
        instructed[task.metadata.name] = [
            side for side in ("query", "document", None) if gets_instruction(task.metadata, side)
        ]
    both = {name for name, sides in instructed.items() if "document" in sides}
    assert both == {"QuoraRetrieval", "AskUbuntuDupQuestions", "StackOverflowDupQuestions"}
    assert all("query" in sides and None in sides for sides in instructed.values())


def test_the_papers_wording_differs_from_mtebs_where_it_should():
    """STS and summarization have no instruction in mteb 2.26; three more are worded differently."""
    differ = []
    for task in find_tasks("MTEB(eng, v1)"):
        if task.metadata.name == "CQADupstackRetrieval":
            continue  # twelve tasks in one, each with its own prompt
        side = "query" if task.metadata.type in ("Retrieval", "Reranking") else None
        prompt = task.metadata.prompt
        own = prompt.get("query") if isinstance(prompt, dict) else prompt
        if own != task_instruction(task.metadata, side, "paper"):
            differ.append(task.metadata.name)
        assert task_instruction(task.metadata, side, "paper") == paper_instruction(
            task.metadata.name
        )
        assert task_instruction(task.metadata, side, "mteb")
    types = {task.metadata.name: task.metadata.type for task in find_tasks("MTEB(eng, v1)")}
    assert {name for name, kind in types.items() if kind in ("STS", "Summarization")} <= set(
        differ
    ) and len(differ) == 14, differ


@pytest.mark.parametrize("prompts", PROMPTS)
def test_tasks_that_the_paper_lacks_are_asked_as_mteb_asks(prompts):
    (task,) = find_tasks("LegalBenchConsumerContractsQA")
    wording = task_instruction(task.metadata, "query", prompts)
    assert wording == (
        None if prompts == "none" else task_instruction(task.metadata, "query", "mteb")
    )


# ---- plain files


def test_packed_and_plain_files_are_the_same_task(tmp_path):
    plain = write(tmp_path / "a" / "sts" / "STS12", pairs=[PAIR, OTHER_PAIR])
    packed = tmp_path / "b" / "STS12"
    packed.mkdir(parents=True)
    with gzip.open(packed / "pairs.jsonl.gz", "wt") as file:
        file.write(lines([PAIR, OTHER_PAIR]))
    (one,) = local_tasks(tmp_path / "a")
    (two,) = local_tasks(tmp_path / "b")
    for task in (one, two):
        task.load_data()
    assert one.dataset["default"]["test"].to_dict() == two.dataset["default"]["test"].to_dict()
    assert type(one).__mro__[1] is type(two).__mro__[1] is type(find_tasks("STS12")[0])
    assert task_size(one) == task_size(two) == (plain / "pairs.jsonl").stat().st_size


def test_the_fingerprint_is_of_the_data_alone(tmp_path):
    folder = write(tmp_path / "sts" / "STS12", pairs=[PAIR])
    before = data_fingerprint(folder)
    (folder / "meta.json").write_text('{"note": "anything"}')
    assert data_fingerprint(folder) == before
    write(folder, pairs=[PAIR, PAIR])
    assert data_fingerprint(folder) != before
    assert local_tasks(tmp_path)[0].metadata.revision == data_fingerprint(folder)


def test_files_of_an_editor_are_no_data(tmp_path):
    """A backup beside the data, and the byte order mark that some editors write."""
    folder = write(tmp_path / "Mine", pairs=[PAIR])
    before = data_fingerprint(folder)
    for backup in ("pairs.jsonl~", "pairs.jsonl.bak", "train.jsonl.swp"):
        (folder / backup).write_text("old")
    (folder / "meta.json").write_bytes(b'\xef\xbb\xbf{"note": "made by hand"}')
    (task,) = local_tasks(tmp_path)
    assert data_fingerprint(folder) == before
    assert task.metadata.description.endswith("made by hand")


def test_files_of_another_format_are_not_passed_over(tmp_path):
    folder = write(tmp_path / "Mine", pairs=[PAIR])
    (folder / "pairs.jsonl").rename(folder / "pairs.csv")
    assert "Mine: its files and the fields of their rows match no kind of task" in fault(tmp_path)


@pytest.mark.parametrize("odd", ["null", "7", '"sentence1 sentence2 score"', "[]"])
def test_an_odd_first_line_is_a_fault_of_its_task_alone(tmp_path, odd):
    folder = write(tmp_path / "Mine", pairs=[PAIR])
    (folder / "pairs.jsonl").write_text(f"{odd}\n")
    assert "Mine: its files and the fields of their rows match no kind of task" in fault(tmp_path)


def test_a_stand_in_says_that_it_is_none_of_mtebs(tmp_path):
    folder = write(tmp_path / "sts" / "Mine", pairs=[PAIR])
    (folder / "meta.json").write_text('{"note": "made by hand", "instruction": "Find the same"}')
    (task,) = local_tasks(tmp_path)
    assert task.metadata.description == "Not a task of MTEB, read from plain files: made by hand"
    assert (
        task_instruction(task.metadata, None) == "Find the same"
        and task.metadata.main_score == "cosine_spearman"
    )


def test_only_judged_queries_are_asked(tmp_path):
    queries = [
        {"_id": "q1", "text": "one"},
        {"_id": 2, "text": "two"},
        {"_id": "train", "text": "not asked"},
    ]
    write(
        tmp_path / "retrieval" / "R",
        corpus=DOCUMENTS,
        queries=queries,
        qrels="q\td\ts\nq1\td1\t2\nq1\td2\t0\n2\td2\t1\n",
    )
    (task,) = local_tasks(tmp_path)
    task.load_data()
    found = task.dataset["default"]["test"]
    assert found["queries"]["id"] == ["q1", "2"] and found["relevant_docs"] == {
        "q1": {"d1": 2, "d2": 0},
        "2": {"d2": 1},
    }


def test_reranking_without_a_negative_is_left_out(tmp_path):
    rows = [
        {"query": "a", "positive": ["p"], "negative": []},
        {"query": "b", "positive": ["p"], "negative": ["n", "m"]},
    ]
    write(tmp_path / "reranking" / "R", test=rows)
    (task,) = local_tasks(tmp_path)
    task.load_data()
    found = task.dataset["default"]["test"]
    assert (
        found["queries"]["text"] == ["b"]
        and len(found["corpus"]) == 3
        and len(next(iter(found["top_ranked"].values()))) == 3
    )


QRELS = "query-id\tcorpus-id\tscore\nq\td1\t1\n"
QUERY = [{"_id": "q", "text": "a ship"}]
FAULTS = {
    "no corpus": (
        "retrieval",
        dict(queries=QUERY, qrels=QRELS),
        "R has no corpus.jsonl (or .jsonl.gz), which a task of its kind needs; add it",
    ),
    "no qrels": (
        "retrieval",
        dict(corpus=DOCUMENTS, queries=QUERY),
        "R has no qrels.tsv (or .tsv.gz)",
    ),
    "empty corpus": (
        "retrieval",
        dict(corpus=[], queries=QUERY, qrels=QRELS),
        "corpus.jsonl is empty",
    ),
    "no answer": (
        "retrieval",
        dict(corpus=DOCUMENTS[:1], queries=QUERY, qrels=QRELS),
        "query 'q' has no relevant document in corpus.jsonl",
    ),
    "only zeros": (
        "retrieval",
        dict(corpus=DOCUMENTS, queries=QUERY, qrels="query-id\tcorpus-id\tscore\nq\td1\t0\n"),
        "query 'q' has no relevant document",
    ),
    "unknown query": (
        "retrieval",
        dict(corpus=DOCUMENTS, queries=QUERY, qrels=QRELS + "z\td1\t1\n"),
        "query 'z' is not in queries.jsonl",
    ),
    "twice": (
        "retrieval",
        dict(corpus=DOCUMENTS + DOCUMENTS[:1], queries=QUERY, qrels=QRELS),
        "corpus.jsonl:4: the id 'd0' is in",
    ),
    "bad qrels": (
        "retrieval",
        dict(corpus=DOCUMENTS, queries=QUERY, qrels=QRELS + "q d1 1\n"),
        "qrels.tsv:3: a line must be",
    ),
    "no qrels lines": (
        "retrieval",
        dict(corpus=DOCUMENTS, queries=QUERY, qrels="query-id\tcorpus-id\tscore\n"),
        "judges no query",
    ),
    "bad JSON": (
        "sts",
        dict(pairs=lines([PAIR]) + '{"sentence1": "a\n'),
        "pairs.jsonl:2: broken JSON at column 15",
    ),
    "text score": (
        "sts",
        dict(pairs=[PAIR | {"score": "high"}]),
        "pairs.jsonl:1: score: Input should be a valid number, got 'high'; correct it",
    ),
    "NaN score": (
        "sts",
        dict(pairs=[PAIR, PAIR | {"score": float("nan")}]),
        "pairs.jsonl:2: score: Input should be a finite number, got 'nan'; correct it",
    ),
    "infinite score": (
        "sts",
        dict(pairs=[PAIR | {"score": float("inf")}]),
        "pairs.jsonl:1: score: Input should be a finite number, got 'inf'; correct it",
    ),
    "one row": ("sts", dict(pairs=[PAIR]), "R: all scores are 4.5"),
    "nothing to rank": (
        "reranking",
        dict(test=[{"query": "a", "positive": ["b"], "negative": []}]),
        "R: no query has a negative",
    ),
    "title list": (
        "retrieval",
        dict(
            corpus=[DOCUMENTS[0] | {"title": ["a"]}],
            queries=[{"_id": "q", "text": "a"}],
            qrels="q\td\ts\nq\td0\t1\n",
        ),
        "corpus.jsonl:1: title: Input should be a valid string, got \"['a']\"",
    ),
    "no field": (
        "pairclassification",
        dict(test=[{"sentence1": "a", "label": 1}]),
        "test.jsonl:1: sentence2: Field required",
    ),
    "one label": (
        "pairclassification",
        dict(test=[PAIR | {"label": 1}]),
        "the labels must be 0 and 1, both of them; they are ['1']",
    ),
    "no train": ("classification", dict(test=[{"text": "a", "label": 1}]), "R has no train.jsonl"),
    "strange label": (
        "classification",
        dict(train=[{"text": "a", "label": 1}], test=[{"text": "b", "label": 2}]),
        "label 2 of test is not in train",
    ),
    "lengths": (
        "clustering",
        dict(test=[{"sentences": ["a", "b"], "labels": ["x"]}]),
        "test.jsonl:1: 2 sentences and 1 labels",
    ),
    "no positive": (
        "reranking",
        dict(test=[{"query": "a", "positive": [], "negative": ["n"]}]),
        "test.jsonl:1: positive: List should have at least 1 item",
    ),
    "not a list": (
        "reranking",
        dict(test=[{"query": "a", "positive": "p", "negative": ["n"]}]),
        "test.jsonl:1: positive: Input should be a valid list, got 'p'",
    ),
    "an array": (
        "sts",
        dict(pairs="[1, 2]\n"),
        "pairs.jsonl:1: Input should be a valid dictionary",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_place(tmp_path, name):
    kind, files, message = FAULTS[name]
    write(tmp_path / kind / "R", **files)
    assert message in fault(tmp_path).replace(f"{kind}/R/", "").replace(f"{kind}/R", "R")


def test_a_cut_off_gzip_file(tmp_path):
    folder = write(tmp_path / "sts" / "STS12", pairs=[PAIR] * 500)
    whole = gzip.compress((folder / "pairs.jsonl").read_bytes())
    (folder / "pairs.jsonl").unlink()
    (folder / "pairs.jsonl.gz").write_bytes(whole[:-20])
    assert "cut off" in fault(tmp_path)


def test_folders_that_hold_no_tasks(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        local_tasks(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no task"):
        local_tasks(tmp_path)
    write(tmp_path / "STS12", pairs=[PAIR])
    write(tmp_path / "sts" / "STS12", pairs=[PAIR])
    with pytest.raises(InputError, match="two tasks called STS12"):
        local_tasks(tmp_path)


def test_a_name_of_mteb_with_data_of_another_kind(tmp_path):
    write(tmp_path / "sts" / "SciFact", pairs=[PAIR])
    write(tmp_path / "sts" / "STS12", pairs=[PAIR])
    opened = open_tasks(None, tmp_path)
    assert isinstance(opened["SciFact"], InputError) and "SciFact is a Retrieval task" in str(
        opened["SciFact"]
    )
    assert opened["STS12"].metadata.name == "STS12"  # the other tasks stay usable


def test_a_task_of_many_languages_must_say_which(tmp_path):
    folder = write(
        tmp_path / "retrieval" / "MIRACLRetrieval", corpus=DOCUMENTS, queries=QUERY, qrels=QRELS
    )
    with pytest.raises(InputError, match="several subsets in mteb"):
        local_tasks(tmp_path)
    (folder / "meta.json").write_text('{"subset": "sw"}')
    (task,) = local_tasks(tmp_path)
    task.load_data()
    assert task.hf_subsets == ["sw"] and list(task.dataset["sw"]) == ["dev"] == list(
        task.eval_splits
    )
    (folder / "meta.json").write_text("{")
    with pytest.raises(InputError, match="Invalid JSON"):
        local_tasks(tmp_path)


# ---- real files


@needs_data
def test_real_tasks_are_mtebs_own_size():
    """Characters and counts equal those that mteb publishes, if the data are MTEB's."""
    exact = (
        "SciFact",
        "NFCorpus",
        "STS17",
        "STSBenchmark",
        "Banking77Classification",
        "EmotionClassification",
    )
    for task in local_tasks(REAL, exact):
        task.load_data()
        (subset,) = task.hf_subsets
        (split,) = task.eval_splits
        if task.metadata.type == "Retrieval":
            found = task.dataset[subset][split]
            published = task.metadata.descriptive_stats[split]
            texts = [f"{row['title']} {row['text']}".strip() for row in found["corpus"]] + list(
                found["queries"]["text"]
            )
            assert (len(found["corpus"]), len(found["queries"])) == (
                published["num_documents"],
                published["num_queries"],
            )
            assert sum(map(len, texts)) == published["number_of_characters"]
        else:
            published = task.metadata.descriptive_stats[split]
            published = published.get("hf_subset_descriptive_stats", {subset: published})[subset]
            assert len(task.dataset[subset][split]) == published["num_samples"]
        task.unload_data()


@needs_data
def test_the_subset_names_what_is_not_there():
    opened = open_tasks("subset15", REAL)
    missing = {name for name, task in opened.items() if isinstance(task, InputError)}
    assert len(opened) == 15 and {"ArguAna", "SICK-R", "SprintDuplicateQuestions"} <= missing
    assert {"SciFact", "STS17", "Banking77Classification"} <= opened.keys() - missing


def test_a_task_whose_files_change_is_refused_when_its_turn_comes(tmp_path):
    folder = tmp_path / "sts" / "Mine"
    folder.mkdir(parents=True)
    (folder / "pairs.jsonl").write_text(lines([PAIR, OTHER_PAIR]))
    first, second = (open_tasks(None, tmp_path)["Mine"] for _ in range(2))
    first.load_data()
    (folder / "pairs.jsonl").write_text(lines([PAIR, OTHER_PAIR, PAIR | {"score": 2.0}]))
    with pytest.raises(InputError, match="a file was changed after the task was opened"):
        second.load_data()


def test_a_document_that_is_judged_twice_with_other_scores_is_refused(tmp_path):
    folder = tmp_path / "retrieval" / "Own"
    folder.mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "text": "a"}\n{"_id": "e", "text": "b"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "c"}\n')
    lines = "query-id\tcorpus-id\tscore\nq\td\t1\nq\te\t0\nq\td\t1\n"
    (folder / "qrels.tsv").write_text(lines)
    task = open_tasks(None, tmp_path)["Own"]
    task.load_data()
    assert task.dataset["default"]["test"]["relevant_docs"] == {"q": {"d": 1, "e": 0}}
    (folder / "qrels.tsv").write_text(lines + "q\td\t0\n")
    with pytest.raises(InputError, match=r"qrels.tsv:5: .*judged for query 'q' before"):
        open_tasks(None, tmp_path)["Own"].load_data()
