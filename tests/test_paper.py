"""The paper's tables agree with each other, and our scores are shown beside them from a user's
files, seeds and faults.
"""

import json
from importlib.resources import files

import numpy as np
import pytest

from anchor_embedding.common.errors import InputError
from anchor_embedding.evaluate.comparison import compare, comparison_rows
from anchor_embedding.evaluate.paper import TABLES, paper_scores, paper_table, paper_tasks
from anchor_embedding.evaluate.scored import query_differences
from anchor_embedding.evaluate.significance import paired_bootstrap
from anchor_embedding.evaluate.tasks import subset15

CATEGORY_SIZES = {
    "retrieval": 15,
    "reranking": 4,
    "clustering": 11,
    "pair_classification": 3,
    "classification": 12,
    "sts": 10,
    "summarization": 1,
}
# printed in Table 1, and what the tasks of Tables 14 and 15 give, if the two differ by more than
# rounding
DISAGREEMENTS = {
    ("Qwen2.5-1.5B-Instruct", "baseline", "pair_classification"): (84.41, 82.97),
    ("Llama-3.1-8B-Instruct", "baseline", "clustering"): (46.64, 45.69),
    ("Llama-3.2-3B-Instruct", "anchor", "summarization"): (30.81, 30.98),
    ("Llama-3.1-8B-Instruct", "baseline", "reranking"): (58.92, 58.95),
    ("Llama-3.1-8B-Instruct", "baseline", "retrieval"): (55.36, 55.38),
}
FIFTEEN = {  # printed in Tables 5 and 10, or not printed (Qwen, 8B)
    "Llama-3.2-1B-Instruct": (63.95, 65.19),
    "Llama-3.2-3B-Instruct": (65.24, 66.16),
    "Qwen2.5-1.5B-Instruct": (64.39, 64.98),
    "Llama-3.1-8B-Instruct": (66.79, 67.79),
}


def by_task():
    """model → system → task → points, read without the library."""
    scores = {}
    for number in (14, 15):
        text = (
            files("anchor_embedding") / "resources" / "paper" / f"table{number}.csv"
        ).read_text()
        for line in text.splitlines()[1:]:
            task, model, system, score = line.split(",")
            scores.setdefault(model, {}).setdefault(system, {})[task] = float(score)
    return scores


def scores_file(folder, name, scores, **about):
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {task: {"main_score": score, "metric": "m"} for task, score in scores.items()}
    (folder / "scores.json").write_text(json.dumps({"model": name, "about": about, "tasks": tasks}))
    return folder


def test_every_average_of_the_paper_but_the_listed_ones_follows_from_its_tasks():
    category = paper_tasks()["category"]
    assert category.value_counts().to_dict() == CATEGORY_SIZES
    table = paper_table(1).set_index(["model", "system"])
    off = {}
    for model, systems in by_task().items():
        for system, tasks in systems.items():
            assert set(tasks) == set(category.index)
            printed = table.loc[(model, system)]
            assert np.mean(list(tasks.values())) == pytest.approx(printed["average"], abs=0.0101)
            for name in CATEGORY_SIZES:
                mean = np.mean([score for task, score in tasks.items() if category[task] == name])
                if abs(mean - printed[name]) > 0.0101:
                    off[(model, system, name)] = (printed[name], round(mean + 1e-9, 2))
    assert off == DISAGREEMENTS


def test_fifteen_task_averages():
    known = paper_tasks()
    assert known[known["subset15"]].groupby("category").size().to_dict() == {
        "retrieval": 3,
        "reranking": 2,
        "clustering": 3,
        "pair_classification": 1,
        "classification": 3,
        "sts": 3,
    }
    for model, systems in by_task().items():
        means = [
            np.mean([systems[s][task] for task in known.index[known["subset15"]]])
            for s in ("baseline", "anchor")
        ]
        assert means == pytest.approx(FIFTEEN[model], abs=0.0051)
    stages = paper_table(10).set_index("setting")
    for size, model in (("1B", "Llama-3.2-1B-Instruct"), ("3B", "Llama-3.2-3B-Instruct")):
        assert (
            stages.loc["only stage II", size],
            stages.loc["stage I + stage II", size],
        ) == FIFTEEN[model]
    extra = paper_table(5).set_index("configuration")["average"]
    assert (extra.iloc[0], extra.loc["stage I + stage II"]) == FIFTEEN["Llama-3.2-1B-Instruct"]


def test_the_fifteen_tasks_are_those_that_are_evaluated():
    assert set(subset15()) == set(paper_tasks().query("subset15").index)


def test_tables_repeat_each_other():
    one = paper_table(1).set_index(["model", "system"]).drop(columns="average")
    two = paper_table(2).set_index("model")
    three = paper_table(3).set_index("variant")
    for name in one:
        assert (
            two.loc["Anchor-LLaMA-3.1-8B-Instruct", name]
            == one.loc[("Llama-3.1-8B-Instruct", "anchor"), name]
        )
        for variant in ("baseline", "anchor"):
            assert three.loc[variant, name] == one.loc[("Llama-3.2-1B-Instruct", variant), name]
    assert paper_table(4).set_index("alpha")["average"][0.2] == 65.19
    assert all(paper_table(number).attrs["title"] for number in TABLES)


def test_missing_tasks_are_listed_and_no_average_claims_more_than_it_has(tmp_path):
    scores = dict.fromkeys(paper_tasks().query("subset15").index, 0.5)
    del scores["ArguAna"]
    scores_file(tmp_path / "m", "m", scores)
    text = str(compare(tmp_path / "m"))
    assert "15-task average" not in text and "56-task average" not in text
    assert "mean over 14 of the 15 tasks" in text and "mean over 2 of 15 tasks" in text
    missing = " ".join(text[text.index("Missing here, Retrieval") :].split())
    named = [task for task in paper_tasks().index if task not in scores]
    assert all(task in missing for task in named) and "ArguAna*" in missing
    scores_file(tmp_path / "m", "m", scores | {"ArguAna": 0.5})
    rows = comparison_rows(compare(tmp_path / "m")).set_index("row")
    assert rows.loc[
        "15-task average", ["m", "paper baseline", "paper anchor"]
    ].tolist() == pytest.approx([50, 63.95, 65.19], abs=0.01)


def test_seeds_of_one_recipe_are_found_on_disk_and_other_recipes_kept_apart(tmp_path):
    for name, seed, steps, score in (("a", 1, 40, 0.5), ("b", 2, 40, 0.6), ("c", 1, 80, 0.9)):
        run = scores_file(tmp_path / name, name, {"STS17": score, "SciFact": score})
        (run / "recipe.toml").write_text(f'name = "{name}"\nseed = {seed}\nsteps = {steps}\n')
    comparison = compare([tmp_path / name for name in "abc"], paper="Qwen2.5-1.5B-Instruct")
    assert {label: len(runs.columns) for label, runs in comparison.ours.items()} == {"a": 2, "c": 1}
    row = comparison_rows(comparison).set_index("row").loc["mean over 2 of 56 tasks"]
    assert row["a"] == pytest.approx(55) and row["a sd"] == pytest.approx(np.std([50, 60], ddof=1))
    assert np.isnan(row["c sd"]) and "a: 2" in str(comparison)
    theirs = paper_scores("Qwen2.5-1.5B-Instruct").loc[["STS17", "SciFact"], "anchor"].mean()
    assert row["a − paper"] == pytest.approx(55 - theirs)


def test_of_a_sweep_the_last_checkpoint_counts(tmp_path):
    for step in (8, 16):
        scores_file(
            tmp_path / "anchor-stage2" / "evaluations" / f"step-{step:06}",
            f"step-{step:06}",
            {"STS17": step / 100},
        )
    (tmp_path / "anchor-stage2" / "recipe.toml").write_text("seed = 1\n")
    comparison = compare(tmp_path / "anchor-stage2")
    assert {label: float(runs.loc["STS17", 0]) for label, runs in comparison.ours.items()} == {
        "anchor-stage2 step-000016": 16
    }
    assert comparison.systems == {"anchor-stage2 step-000016": "anchor"}


def test_of_two_sweeps_the_last_checkpoint_of_each_setting_is_shown(tmp_path):
    place = tmp_path / "anchor-stage2" / "evaluations"
    for step, ends in ((900_000, ("", "-mteb")), (1_000_000, ("", "-mteb-float32", "-mteb"))):
        for end in ends:
            scores_file(
                place / f"step-{step:06}{end}", f"step-{step:06}{end}", {"STS17": step / 2e6}
            )
    (tmp_path / "anchor-stage2" / "recipe.toml").write_text("seed = 1\n")
    shown = {
        label.split()[-1]: float(runs.loc["STS17", 0])
        for label, runs in compare(tmp_path / "anchor-stage2").ours.items()
    }
    assert shown == {"step-1000000": 50, "step-1000000-mteb": 50, "step-1000000-mteb-float32": 50}


def test_other_prompts_are_not_another_seed(tmp_path):
    for name, prompts in (("a", "paper"), ("b", "mteb")):
        run = scores_file(tmp_path / name, "m", {"STS17": 0.5}, prompts=prompts)
        (run / "recipe.toml").write_text(f'name = "{name}"\nseed = {ord(name)}\nsteps = 4\n')
    assert list(compare(tmp_path).ours) == ["m", "m (2)"]


@pytest.mark.parametrize(
    "changed", [{"max_length": 128}, {"dtype": "bfloat16"}, {"data_revision": "other"}]
)
def test_what_was_scored_otherwise_is_no_seed_and_not_compared_query_by_query(tmp_path, changed):
    def run(name, seed, data_revision="one", **about):
        folder = scores_file(tmp_path / name, name, {"STS17": 0.5, "SciFact": 0.5}, **about)
        (folder / "recipe.toml").write_text(f'name = "{name}"\nseed = {seed}\nsteps = 4\n')
        found = json.loads((folder / "scores.json").read_text())
        found["tasks"]["SciFact"] |= {"key": name, "data_revision": data_revision}
        (folder / "scores.json").write_text(json.dumps(found))
        figures = {f"test/default/{i}": 0.1 * (i % 4) + 0.1 * seed for i in range(20)}
        (folder / "queries.json").write_text(
            json.dumps({"SciFact": {"key": name, "scores": figures}})
        )
        return folder

    usual = {"prompts": "paper", "max_length": 512, "dtype": "float32"}
    a = run("b-base-line", 1, **usual)
    b = run("b", 2, **usual | changed)
    comparison = compare([a, b])
    assert list(comparison.ours) == ["b-base-line", "b"] and not len(query_differences([a, b]))
    (remark,) = (remark for remark in comparison.remarks if "query by query" in remark)
    name, value = next(iter(changed.items()))
    assert remark.startswith("b and b-base-line are not compared")
    assert (
        "the data are not the same" in remark
        if name == "data_revision"
        else f"{name} {value} and {usual[name]}" in remark
    )
    again = run("again", 2, **usual)
    assert {label: len(runs.columns) for label, runs in compare([a, b, again]).ours.items()} == {
        "b-base-line": 2,
        "b": 1,
    }
    same = run("b", 1, **usual)  # the same seed: two models, and compared
    assert (
        compare([a, same]).remarks[0].startswith("b − b-base-line, 95 %")
        and "+0.00 [+0.00" in compare([a, same]).remarks[0]
    )


@pytest.mark.parametrize(
    "content, contains",
    [
        ("{", "is no scores.json (Expecting property name"),
        ("[]", "valid dictionary"),
        ('{"tasks": {"STS17": {"main_score": 50}}}', "STS17"),
    ],
)
def test_broken_scores_are_refused_with_file_and_task(tmp_path, content, contains):
    (tmp_path / "scores.json").write_text(content)
    with pytest.raises(InputError, match=r"scores\.json") as caught:
        compare(tmp_path)
    assert contains in str(caught.value)


def test_a_model_whose_tasks_all_failed_is_left_out(tmp_path):
    scores_file(tmp_path / "good", "good", {"STS17": 0.5})
    broken = scores_file(tmp_path / "broken", "broken", {}) / "scores.json"
    broken.write_text(
        json.dumps({"model": "broken", "about": {}, "tasks": {}, "errors": {"STS17": "no gold"}})
    )
    comparison = compare(tmp_path)
    assert list(comparison.ours) == ["good"]
    assert {"Left out, because all its tasks failed: broken", "Failed here, STS17: no gold"} <= set(
        comparison.remarks
    )
    with pytest.raises(InputError, match="every task of every model failed"):
        compare(broken)


@pytest.mark.parametrize(
    "content",
    ["[]", '{"STS17": {}}', '{"STS17": 3}', "{", '{"STS17": {"key": "k", "scores": {"a": "b"}}}'],
)
def test_a_broken_queries_file_is_named_and_its_removal_helps(tmp_path, content):
    beside = scores_file(tmp_path / "m", "m", {"STS17": 0.5}) / "queries.json"
    beside.write_text(content)
    with pytest.raises(InputError, match=r"queries\.json.*remove the file"):
        compare(tmp_path)
    beside.unlink()
    assert compare(tmp_path).seen == ["STS17"]


def test_nothing_in_common_with_the_paper(tmp_path):
    scores_file(tmp_path, "m", {"Own": 0.5})
    comparison = compare(tmp_path)
    assert "average" not in str(comparison).split("Points.")[0] and "in no average: Own" in str(
        comparison
    )
    for form in ("md", "html", "tex", "csv"):
        assert "Own" in comparison.render(form)


def test_bootstrap_of_many_queries_needs_little_memory():
    rng = np.random.default_rng(0)
    a = rng.random(20_000)
    found = paired_bootstrap(a + 0.01, a, samples=200)
    assert found.difference == pytest.approx(0.01) and found.verdict == "ahead" and found.p < 1e-6


def seeded_run(folder, name, seed, better, steps=4):
    """Scores and figures of the queries of one run, with its recipe; runs of one recipe with other
    seeds are one model.
    """
    folder = scores_file(folder / f"{name}-{seed}", name, {"SciFact": 0.5})
    (folder / "recipe.toml").write_text(f'name = "{name}"\nseed = {seed}\nsteps = {steps}\n')
    found = json.loads((folder / "scores.json").read_text())
    found["tasks"]["SciFact"]["key"] = "k"
    (folder / "scores.json").write_text(json.dumps(found))
    draw = np.random.default_rng([seed, steps])
    figures = {f"test/default/{i}": 0.4 + better + 0.1 * float(draw.random()) for i in range(20)}
    (folder / "queries.json").write_text(json.dumps({"SciFact": {"key": "k", "scores": figures}}))
    return folder


@pytest.mark.parametrize(("seeds", "verdict"), [(1, "open"), (5, "open"), (6, "ahead")])
def test_a_verdict_takes_seeds(tmp_path, seeds, verdict):
    runs = [seeded_run(tmp_path, "plain", seed, 0.0) for seed in range(seeds)]
    runs += [seeded_run(tmp_path, "better", seed, 0.2, steps=8) for seed in reversed(range(seeds))]
    (row,) = query_differences(runs).itertuples()
    assert (row.model, row.than, row.seeds, row.queries, row.verdict) == (
        "better",
        "plain",
        seeds,
        20,
        verdict,
    )
    assert row.points == pytest.approx(20, abs=3)
    (remark,) = (remark for remark in compare(runs).remarks if remark.startswith("better − plain"))
    words = {
        1: "one run an arm: runs of this size differ by about ±",
        5: "5 seeds cannot give p of 0.05 or less",
        6: "better is ahead",
    }
    assert words[seeds] in remark and (
        verdict != "open"
        or not any(word in remark for word in ("ahead", "behind", "told from noise"))
    )


def test_runs_without_a_common_seed_are_not_compared(tmp_path):
    runs = [seeded_run(tmp_path, "plain", seed, 0.0) for seed in (1, 2)] + [
        seeded_run(tmp_path, "better", seed, 0.2, steps=8) for seed in (3, 4)
    ]
    assert not len(query_differences(runs)) and "share no seed" in " ".join(compare(runs).remarks)


@pytest.mark.parametrize("first", [True, False])
def test_an_untouched_model_is_compared_with_the_runs_of_every_seed(tmp_path, first):
    untouched = seeded_run(tmp_path, "untouched", 9, 0.0)
    (untouched / "recipe.toml").unlink()
    runs = [seeded_run(tmp_path, "better", seed, 0.2, steps=8) for seed in range(6)]
    (row,) = query_differences([untouched, *runs] if first else [*runs, untouched]).itertuples()
    assert row.seeds == 6 and row.points == pytest.approx(20 if first else -20, abs=3)
    assert row.verdict == ("ahead" if first else "behind")
    assert not any("not compared" in remark for remark in compare([untouched, *runs]).remarks)
