"""The main command, shortened: its arms on a tiny base and docstring pairs; the real one runs on
SmolLM2.
"""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from anchor_embedding.cli import training
from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.data.docstrings import docstring_pairs
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.evaluate import heldout
from anchor_embedding.model.base import resolve_base
from anchor_embedding.study import pipeline as pipelines
from anchor_embedding.study.arms import run_arm, shared_runs
from anchor_embedding.study.pipeline import run_pipeline
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import train

TRAINED_ON = ("numpy", "requests", "packaging")
HELDOUT = ("joblib", "tqdm")
METRICS = {"ndcg_at_10", "recall_at_1", "mrr"}
ARMS = ("baseline", "anchor", "primed")


def pipeline(base, *more):
    return load_recipe(
        "quickstart",
        [
            f"base={base}",
            "steps=4",
            "batch_size=8",
            "evaluation.pairs=40",
            "evaluation.every=2",
            *more,
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def few_packages():
    """A few pairs, because reading the docstrings of all packages takes longer than the rest;
    `test_heldout` reads them.
    """
    few = partial(docstring_pairs, packages=[*TRAINED_ON, *HELDOUT], heldout=HELDOUT, cache=False)
    with mock.patch.object(heldout, "docstring_pairs", few):
        yield few


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "out"
    return out, run_pipeline(pipeline(base), out, progress=False, say=lambda text: None)


def test_report_has_what_it_promises(finished):
    out, returned = finished
    report = json.loads((out / "report.json").read_text())
    assert report == json.loads(json.dumps(returned))
    assert {
        "arms",
        "base",
        "bm25",
        "seconds",
        "tokens_per_second",
        "losses",
        "examples",
        "card",
        "findings",
    } <= report.keys()
    for arm in ARMS:
        assert [row["step"] for row in report["arms"][arm]] == [0, 2, 4]
        assert all(METRICS <= row.keys() for row in report["arms"][arm])
    assert METRICS <= report["base"].keys() and METRICS <= report["bm25"].keys()
    assert report["base"] == {
        k: v for k, v in report["arms"]["baseline"][0].items() if k not in ("step", "seconds")
    }
    assert report["losses"].keys() == {
        "baseline/stage2",
        *("anchor/stage1", "anchor/stage2"),
        *("primed/bag", "primed/stage1", "primed/stage2"),
    }
    assert all(len(rows) == 4 for rows in report["losses"].values())
    assert {"anchor_gain_q2d", "anchor_gain_d2q", "mean_cosine"} <= report["losses"][
        "anchor/stage1"
    ][0].keys()
    hits = [(name, own) for e in report["examples"] for name, own in e["hits"].items()]
    assert len(report["examples"]) == 5 and {name for name, _ in hits} > {"bm25"}
    # BM25 shows only what shares a word with the query
    assert all(len(own) == 3 or (name == "bm25" and len(own) < 3) for name, own in hits)
    assert all(hit["score"] > 0 for name, own in hits if name == "bm25" for hit in own)


def test_arms_meet_the_same_batches_and_negatives(finished):
    out, _ = finished
    cards = [json.loads((out / "runs" / f"{arm}-stage2" / "card.json").read_text()) for arm in ARMS]
    for key in ("fingerprint", "competitors"):
        assert cards[0][key] == cards[1][key] == cards[2][key]
    lines = [
        (out / "runs" / f"{arm}-stage2" / "metrics.jsonl").read_text().splitlines() for arm in ARMS
    ]
    for key in ("tokens", "candidates", "lr"):
        values = [[json.loads(line)[key] for line in part] for part in lines]
        assert values[0] == values[1] == values[2], key


def test_models_load_and_give_the_reported_figures(finished):
    out, _ = finished
    for arm in ARMS:
        vectors = Embedder.from_pretrained(out / arm, dtype="float32").encode(
            ["what holds the ship", "the anchor"]
        )
        assert vectors.shape == (2, 32)
    # a run whose model was handed over is seen to be finished, and names that model
    for arm in ARMS:
        run = out / "runs" / f"{arm}-stage2"
        assert resolve_base(str(run)).path == str(run / "final")
        assert (run / "final").resolve() == (out / arm).resolve()
    whole = load_file(out / "anchor" / "model.safetensors")
    read = load_file(out / "runs" / "anchor-stage2" / "final" / "model.safetensors")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read.items())


def test_page_is_one_file(finished):
    page = (finished[0] / "report.html").read_text()
    assert page.count("<svg") >= 2 and "baseline" in page and "BM25" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page) and "<script" not in page


def test_no_heldout_text_is_trained_on(finished, few_packages):
    report = finished[1]
    pairs = few_packages()
    assert set(report["card"]["heldout_packages"]) == set(pairs.heldout_packages)
    trained = {text for pair in pairs.train for text in (pair.query, pair.positive)}
    assert not trained & {
        text for example in report["examples"] for text in (example["query"], example["positive"])
    }


def test_a_finished_folder_is_not_overwritten(base, finished):
    with pytest.raises(InputError, match="already holds a finished run"):
        run_pipeline(pipeline(base), finished[0], progress=False, say=lambda text: None)


def test_one_of_several_processes_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="runs in one process; start it without the launcher"):
        run_pipeline(pipeline(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_pipeline_goes_on(base, finished, tmp_path):
    out, report = finished
    small = pipeline(base)
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    for name in ("report.json", "report.html"):
        (copy / name).unlink()
    shutil.rmtree(copy / "anchor")  # stopped in the last stage of the second arm
    with pytest.raises(InputError, match=r"other settings \(.*: alpha was 0.2 and is now 0.5\)"):
        run_pipeline(
            pipeline(base, "stage1.alpha=0.5"), copy, progress=False, say=lambda text: None
        )
    log = copy / "runs" / "baseline-stage2" / "metrics.jsonl"
    log.rename(copy / "log")
    with pytest.raises(InputError, match=r"baseline-stage2/metrics\.jsonl is gone"):
        run_pipeline(small, copy, progress=False, say=lambda text: None)
    (copy / "log").rename(log)
    # what does not change the result may change
    small = pipeline(base, "checkpoint_every=2", "keep_checkpoints=1")
    again = run_pipeline(small, copy, progress=False, say=lambda text: None)
    for arm, rows in report["arms"].items():
        for row, other in zip(rows, again["arms"][arm], strict=True):
            assert {k: v for k, v in row.items() if k != "seconds"} == {
                k: v for k, v in other.items() if k != "seconds"
            }


def test_arms_that_begin_alike_train_their_first_stage_once(base, few_packages, tmp_path):
    """As in Table 10: Stage I alone, and both stages. What an arm becomes does not depend on it."""
    stages = {name: pipeline(base).stages[name] for name in ("stage1", "stage2")}
    arms = {"stage1": ("stage1",), "anchor": ("stage1", "stage2")}
    small = replace(pipeline(base), stages=stages, arms=arms)
    quiet = {"progress": False, "say": lambda text: None}
    with mock.patch("anchor_embedding.study.arms.train", wraps=train) as trained:
        report = run_pipeline(small, tmp_path / "both", **quiet)
    names = ["stage1-stage1", "anchor-stage2"]
    assert [call.args[0].name for call in trained.call_args_list] == names
    assert {path.name for path in (tmp_path / "both" / "runs").iterdir()} == {*names}
    alone = run_pipeline(replace(small, arms={"anchor": arms["anchor"]}), tmp_path / "one", **quiet)
    for key in ("stage1", "stage2"):
        assert report["losses"][f"anchor/{key}"] == alone["losses"][f"anchor/{key}"]
    assert report["losses"]["stage1/stage1"] == report["losses"]["anchor/stage1"]
    assert "stage1/stage1" in report["timing"] and "anchor/stage1" not in report["timing"]
    weights = [
        load_file(tmp_path / out / "anchor" / "model.safetensors") for out in ("both", "one")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # a stage that an arm has begun itself stays its own, and so does any with other settings
    assert shared_runs(small.by_arm(), tmp_path / "one") == {"stage1": {}, "anchor": {}}
    other = small.by_arm()
    other["anchor"] = pipeline(base, "stage1.alpha=0.5").by_arm()["anchor"]
    assert shared_runs(other, tmp_path / "new") == {"stage1": {}, "anchor": {}}
    first = tmp_path / "new" / "runs" / "stage1-stage1"
    assert shared_runs(small.by_arm(), tmp_path / "new")["anchor"] == {"stage1": first}


def test_a_stage_goes_on_in_a_folder_that_was_moved(base, few_packages, tmp_path, monkeypatch):
    """The second stage names the folder of the first as its base. Other changes are refused, and
    what was trained is kept.
    """
    arm = pipeline(base, "checkpoint_every=2").by_arm()["anchor"]
    few = few_packages()
    pairs = heldout.SplitPairs(few.train, few.heldout, {})
    seen = []

    def run(out, arm=arm, last=99):
        def on_step(stage, row):
            seen.append((stage, row["step"]))
            if seen[-1] == ("anchor/stage2", last):
                raise RuntimeError("stopped")

        return run_arm(arm, out, base, pairs, lambda model: {}, False, print, on_step)

    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path / "one", last=3)
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    other = pipeline(base, "checkpoint_every=2", "stage2.learning_rate=1e-5").by_arm()["anchor"]
    with pytest.raises(InputError, match="learning_rate was "):
        run(Path("two"), other)
    finished = pipeline(base, "checkpoint_every=2", "stage1.alpha=0.5").by_arm()["anchor"]
    with pytest.raises(InputError, match=r"anchor-stage1/recipe\.toml: alpha was "):
        run(Path("two"), finished)
    seen.clear()
    run(Path("two"))
    assert seen == [("anchor/stage2", 3), ("anchor/stage2", 4)]
    with pytest.raises(InputError, match=r"anchor-stage2/recipe\.toml: learning_rate was "):
        run(Path("two"), other)
    run(tmp_path / "two", pipeline(base, "checkpoint_every=1").by_arm()["anchor"])
    assert len(seen) == 2


def write_pairs(path, start=0):
    path.write_text(
        "".join(
            json.dumps({"query": f"question {i} about anchors", "positive": f"answer {i * i}"})
            + "\n"
            for i in range(start, start + 60)
        )
    )


def test_the_model_of_an_arm_that_was_removed_is_made_again(base, finished, few_packages, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out, symlinks=True)
    weights = load_file(out / "baseline" / "model.safetensors")
    shutil.rmtree(out / "baseline")
    shutil.rmtree(out / "runs" / "baseline-stage2")
    (out / "runs" / "baseline-stage2").mkdir()
    (out / "runs" / "baseline-stage2" / "final").symlink_to("../../baseline")
    (out / "report.json").unlink()
    run_pipeline(pipeline(base), out, progress=False, say=lambda text: None)
    again = load_file(out / "baseline" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())
    assert (out / "runs" / "baseline-stage2" / "final").resolve() == (out / "baseline").resolve()


def test_a_report_does_not_leave_an_arm_out_in_silence(base, finished, few_packages, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out, symlinks=True)
    (out / "report.json").unlink()
    (out / "runs" / "anchor-stage2" / "evals.jsonl").unlink()
    with pytest.raises(InputError, match=r"anchor-stage2/evals\.jsonl is gone"):
        run_pipeline(pipeline(base), out, progress=False, say=lambda text: None)
    assert not (out / "report.json").exists()


@pytest.mark.parametrize("seed", ["", "seed-43"], ids=["first seed", "another"])
def test_a_stage_of_a_comparison_is_not_resumed_alone(base, finished, tmp_path, capsys, seed):
    """It would train on the held-out pairs too, and lose its evaluations."""
    out = tmp_path / "out"
    shutil.copytree(finished[0], out / seed, symlinks=True)
    for name in ("pipeline.toml", "pairs.json") if seed else ():
        (out / seed / name).rename(out / name)
    run = out / seed / "runs" / "anchor-stage2"
    kept = {path: path.read_bytes() for path in run.glob("*.json*")}
    for words in (["--resume", str(run)], [str(run / "recipe.toml"), "--resume"]):
        assert main(["train", *words]) == 2
        assert f"is a stage of the comparison in {out}" in capsys.readouterr().err
    assert kept == {path: path.read_bytes() for path in run.glob("*.json*")}


def test_a_run_beside_any_json_file_is_resumed_by_itself(tmp_path):
    """`runs/NAME` is where runs go, and a measurement may be `runs/OTHER.json`."""
    run = tmp_path / "runs" / "stage1-long"
    run.mkdir(parents=True)
    for content in ('{"contests": {}}', "[1]", "no JSON"):
        run.with_name("stage1.json").write_text(content)
        assert training._comparison_of(run) is None
    run.with_name("stage1.json").write_text('{"asked": {}, "costs": {}}')
    assert training._comparison_of(run) == tmp_path


def test_a_page_that_fails_leaves_the_run_unfinished(finished, tmp_path, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(pipelines, "html_report", fail)
    report = json.loads((finished[0] / "report.json").read_text())
    with pytest.raises(ZeroDivisionError):
        pipelines.finish_report(report, tmp_path, print)
    assert not (tmp_path / "report.json").exists()


def test_a_pipeline_that_evaluates_nothing_says_so_before_it_trains(base, few_packages, tmp_path):
    said = []
    recipe = pipeline(base, "steps=1", "evaluation.every=0")
    report = run_pipeline(recipe, tmp_path / "out", progress=False, say=said.append)
    (warned,) = [n for n, line in enumerate(said) if line.startswith("no arm will be evaluated")]
    assert warned < next(n for n, line in enumerate(said) if "on this machine" in line)
    assert "No arm was evaluated" in report["findings"][0]


def test_own_pairs_instead_of_docstrings(base, tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_pairs(path)
    small = pipeline(base, f"data={path}", "steps=2")
    out = tmp_path / "out"

    def run():
        return run_pipeline(small, out, progress=False, say=lambda text: None)

    assert run()["card"]["counts"] == {"train": 36, "heldout": 12}  # and 12 for the gain
    (out / "report.json").unlink()  # as if it had been stopped just before
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/model.safetensors")}
    report = run()
    assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing is trained again"
    assert report["seconds"] >= sum(report["timing"].values()) - 0.1
    (out / "report.json").unlink()
    write_pairs(path, start=100)
    with pytest.raises(InputError, match="unfinished run on other pairs"):
        run()


def test_a_finished_arm_is_not_compared_with_other_instructions(base, tmp_path):
    """Its files are checked as those of an arm that goes on are, though it is not trained again."""
    write_pairs(tmp_path / "pairs.jsonl")
    table = tmp_path / "asked.csv"
    table.write_text("dataset,instruction,symmetric\npairs,Find the answer,false\n")
    more = (f"data={tmp_path / 'pairs.jsonl'}", "steps=1", f"instructions={table}")
    out = tmp_path / "out"

    def run():
        return run_pipeline(pipeline(base, *more), out, progress=False, say=lambda text: None)

    run()
    (out / "report.json").unlink()
    run()
    (out / "report.json").unlink()
    table.write_text(table.read_text().replace("answer", "question"))
    with pytest.raises(InputError, match=r"instructions = '.*asked.csv': not what this run began"):
        run()


def test_seeds_are_paired_and_told_in_the_report(base, tmp_path):
    small = pipeline(base, "steps=2")
    report = run_pipeline(small, tmp_path / "out", progress=False, say=lambda text: None, seeds=2)
    assert report["seeds"] == [42, 43] and [*report["by_seed"]] == ["42", "43"]

    def lines(seed, arm):
        return (
            (tmp_path / "out" / seed / "runs" / f"{arm}-stage2" / "metrics.jsonl")
            .read_text()
            .splitlines()
        )

    tokens = {
        (seed, arm): [json.loads(line)["tokens"] for line in lines(seed, arm)]
        for seed in ("", "seed-43")
        for arm in ARMS
    }
    for arm in ARMS:
        assert tokens["", arm] == tokens["", "baseline"] != tokens["seed-43", "baseline"]
        assert tokens["seed-43", arm] == tokens["seed-43", "baseline"]
    assert (
        report["findings"][0].startswith("No verdict on the arm with Stage I: the mean nDCG@10")
        and "2 seeds cannot" in report["findings"][0]
    )
    assert "2 seeds cannot" in (tmp_path / "out" / "report.html").read_text()


def test_one_run_gives_no_verdict(finished):
    said = " ".join(finished[1]["findings"][:4])
    assert (
        said.startswith("No verdict on the arm with Stage I")
        and "one run an arm: runs of this size differ by about ±" in said
    )
    assert not any(
        word in said
        for word in ("helps", "hurts", "ahead", "behind", "told from noise", "above it", "below it")
    )
