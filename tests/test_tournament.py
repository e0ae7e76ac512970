"""Tournaments of tiny models: the same batches for all, budgets that give the stated steps,
resumption after an interruption, and clear errors.
"""

import json
import random
from dataclasses import replace

import pytest
import torch
from test_cli import failure

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.data.batches import BatchPlan
from anchor_embedding.data.examples import Example
from anchor_embedding.evaluate.heldout import SplitPairs
from anchor_embedding.evaluate.significance import paired_bootstrap
from anchor_embedding.study.budget import contestants, entrants_of, flops_per_step, spend
from anchor_embedding.study.calibration import against_itself, same_method_runs
from anchor_embedding.study.report import seed_figures
from anchor_embedding.study.tournament import differences, tournament
from anchor_embedding.train import prepare
from anchor_embedding.train.pipeline import from_toml
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.runs import read_log

WORDS = PROSE.split()
DRAW = random.Random(0)
ROWS = [
    Example(" ".join(DRAW.sample(WORDS, 4)), " ".join(DRAW.sample(WORDS, 10)), (), "prose")
    for _ in range(60)
]
PAIRS = SplitPairs(ROWS[12:], ROWS[:12], {"data": "made up"})
QUICKSTART = load_recipe("quickstart")
TWO = replace(
    QUICKSTART,
    stages={name: QUICKSTART.stages[name] for name in ("stage1", "stage2")},
    arms={name: QUICKSTART.arms[name] for name in ("baseline", "anchor")},
)
THREE = [TWO, "smollm2-135m/gircse"]  # baseline, anchor and gircse


def small(base):
    return [f"base={base}", "batch_size=8", "max_length=32", "dtype=float32", "checkpoint_every=2"]


@pytest.fixture(scope="module")
def play(base):
    """A tournament on the same pairs, without messages."""
    return lambda recipes, out, **more: tournament(
        recipes,
        out,
        overrides=small(base),
        progress=False,
        say=lambda text: None,
        **({"pairs": PAIRS, "amount": 6, "every": 2} | more),
    )


@pytest.fixture(scope="module")
def played(play, tmp_path_factory):
    """(its folder, its report)"""
    out = tmp_path_factory.mktemp("tournament") / "out"
    return out, play(THREE, out)


def test_all_see_the_same_batches(played):
    out, report = played
    runs = sorted(path for path in (out / "runs").iterdir() if path.is_dir())
    assert [path.name for path in runs] == [
        "anchor-stage1",
        "anchor-stage2",
        "baseline-stage2",
        "gircse-gircse",
    ]
    assert {json.loads((path / "card.json").read_text())["fingerprint"] for path in runs} == {
        report["pairs"]
    }
    orders = []
    for path in runs:
        recipe = from_toml((path / "recipe.toml").read_text())
        plan = BatchPlan([row.dataset for row in PAIRS.train], recipe.batch_size, recipe.seed)
        orders.append([plan.step(step) for step in range(6)])
    assert all(order == orders[0] for order in orders) and orders[0][0] != orders[0][1]
    tokens = {
        path.name: [line["tokens"] for line in read_log(path / "metrics.jsonl")] for path in runs
    }
    counted = tokens["anchor-stage2"]
    assert (
        counted
        == tokens["baseline-stage2"][: len(counted)]
        == tokens["gircse-gircse"][: len(counted)]
        and len(set(counted)) > 1
    )


def test_report_tells_what_was_spent(played):
    out, report = played
    assert json.loads((out / "tournament.json").read_text()) == json.loads(json.dumps(report))
    assert {name: [row["step"] for row in rows] for name, rows in report["arms"].items()} == {
        "baseline": [0, 2, 4, 6], "anchor": [2, 4, 6], "gircse": [0, 2, 4, 6],
    }  # fmt: skip
    for name, spent in report["spent"].items():
        assert sum(spent["stages"].values()) == 6
        assert report["arms"][name][-1]["flops"] == pytest.approx(
            sum(spent["flops_per_step"][s] * n for s, n in spent["stages"].items())
        )
        lines = [
            line["seconds"]
            for stage in spent["stages"]
            for line in read_log(out / "runs" / f"{name}-{stage}" / "metrics.jsonl")
        ]
        assert (
            spent["seconds"] == pytest.approx(sum(lines), abs=0.02)
            and len(report["ranks"][name]) == 12
        )
    assert {"commit", "device", "recipes", "fingerprint", "machine"} <= report[
        "card"
    ].keys() and report["created"]
    table = (out / "tournament.md").read_text()
    assert all(
        f"| {name} |" in table
        for name in (
            "untouched model", "BM25", "BM25 on what is read", "baseline", "anchor", "gircse"
        )
    )  # fmt: skip
    assert "<svg" in (out / "tournament.svg").read_text()
    first = {(row["first"], row["second"]): row["difference"] for row in report["differences"]}
    last = {name: rows[-1]["ndcg_at_10"] for name, rows in report["arms"].items()}
    assert (
        first["gircse", "baseline"] == pytest.approx(last["gircse"] - last["baseline"])
        and len(first) == 15
    )


def test_a_tournament_does_not_go_on_with_other_tasks(play, tmp_path):
    class Scores:
        def __init__(self, revision):
            self.depends_on = [{"own": [revision, ["test"], ["default"]]}, "auto", 512]

        def __call__(self, embedder):
            return [{"task": "own", "metric": "count", "score": 1.0}]

    play([TWO], tmp_path / "out", tasks=Scores("1"))
    play([TWO], tmp_path / "out", tasks=Scores("1"))
    with pytest.raises(InputError, match="began with another tasks"):
        play([TWO], tmp_path / "out", tasks=Scores("2"))


def test_interrupted_goes_on_and_finished_is_left_alone(played, play, tmp_path):
    _, whole = played
    calls = []

    def interrupt(embedder):  # in the last contestant, after its first checkpoint
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return [{"task": "made up", "metric": "count", "score": 1.0}]

    with pytest.raises(KeyboardInterrupt):
        play(THREE, tmp_path / "out", tasks=interrupt)
    runs = tmp_path / "out" / "runs"
    assert (
        (tmp_path / "out" / "anchor").is_dir()
        and not (tmp_path / "out" / "gircse").exists()
        and [*(runs / "gircse-gircse").glob("step-*")]
    )
    before = {
        path: path.stat().st_mtime_ns
        for name in ("baseline", "anchor")
        for path in runs.glob(f"{name}-*/metrics.jsonl")
    }
    report = play(THREE, tmp_path / "out", tasks=interrupt)
    assert len(json.loads((runs / "gircse-gircse" / "card.json").read_text())["starts"]) == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before and report[
        "ranks"
    ] == whole["ranks"]
    assert all(row["tasks"] == {"made up": 1.0} for rows in report["arms"].values() for row in rows)


@pytest.mark.parametrize("budget", ["flops", "seconds"])
def test_every_budget_gives_the_steps_it_pays_for(played, play, tmp_path, budget):
    _, report = played
    costs = {name: spent["flops_per_step"] for name, spent in report["spent"].items()}
    amount = 7.5 * costs["baseline"]["stage2"] if budget == "flops" else 1.0
    recipes = THREE if budget == "flops" else [entrants_of(load_recipe("quickstart"))["baseline"]]
    found = play(recipes, tmp_path / "out", budget=budget, amount=amount, every=amount / 2)
    for name, spent in found["spent"].items():
        kept = json.loads((tmp_path / "out" / "runs" / f"{name}.json").read_text())["costs"]
        taken = sum(kept[stage] * steps for stage, steps in spent["stages"].items())
        last = [*spent["stages"]][-1]
        assert taken <= amount * (1 + 1e-6) < taken + kept[last] * (1 + 1e-6)
        if budget == "flops":
            assert kept == costs[name] and taken == pytest.approx(spent["flops"])
    if budget == "flops":
        assert (
            found["spent"]["baseline"]["stages"] == {"stage2": 7}
            and found["spent"]["gircse"]["stages"]["gircse"] < 7
        )


def test_operations_are_those_of_the_texts_as_they_are_read(base):
    (arm,) = contestants(["baseline"], small(base)).values()

    def cost(words):
        long = replace(ROWS[0], positive=" ".join(words))
        return flops_per_step(arm, str(base), [long, *ROWS[1:]])

    # 32 tokens are read of the long document, in both cases
    assert cost(WORDS[:20]) == cost(30 * WORDS)


def test_operations_are_those_of_the_budget_that_this_machine_chooses(base, monkeypatch):
    (arm,) = contestants(["baseline"], small(base)).values()
    (recipe,) = arm.stages.values()

    def cost(budget):
        stages = {name: recipe.replace(token_budget=budget) for name in arm.stages}
        return flops_per_step(replace(arm, stages=stages), str(base), ROWS)

    # so little memory that a step has several micro-batches, each read twice
    monkeypatch.setattr(prepare, "least_free", lambda device: 1e5)
    chosen = prepare.fit_to_device(
        recipe.replace(token_budget="auto"), torch.device("cpu"), say=lambda text: None
    )
    assert cost("auto") == cost(chosen.token_budget) != cost(100_000)


def test_stages_keep_their_shares_and_the_rate_its_course():
    settings = [
        "stage1.steps=16",
        "stage1.warmup_steps=4",
        "stage2.steps=40",
        "stage2.warmup_steps=5",
    ]
    anchor = entrants_of(load_recipe("quickstart", settings))["anchor"]
    for amount, steps in {56: [16, 40], 7: [2, 5], 560: [160, 400]}.items():
        arm = spend(anchor, {"stage1": 1.0, "stage2": 1.0}, amount, 1).arm("anchor")
        assert [recipe.steps for recipe in arm] == steps and [
            recipe.warmup_steps for recipe in arm
        ] == [round(steps[0] / 4), round(steps[1] / 8)]


def test_contestants_of_one_name():
    assert list(contestants(["quickstart", "quickstart"])) == ["baseline", "anchor", "primed"]
    with pytest.raises(InputError, match="two different contestants are called `baseline`"):
        contestants(["quickstart", load_recipe("quickstart", ["stage2.temperature=0.1"])])
    with pytest.raises(InputError, match="cannot be called `bm25`"):
        contestants([load_recipe("smollm2-135m/gircse", ["name=bm25"])])


def test_contestants_do_not_share_a_run_folder():
    stage = QUICKSTART.stages["stage2"]
    one, other = (
        replace(QUICKSTART, stages={name: stage}, arms={arm: (name,)})
        for arm, name in (("p", "x-y"), ("p-x", "y"))
    )
    assert [*contestants([one])] == ["p"]
    with pytest.raises(InputError, match="two stages would share the run folder `p-x-y`"):
        contestants([one, other])


def test_differences_have_a_sign_and_one_run_no_verdict():
    (found,) = differences({"worse": [2] * 20, "better": [1] * 20})
    assert (found["first"], found["second"], found["verdict"]) == (
        "better",
        "worse",
        "open",
    ) and found["difference"] > 0
    assert "one run an arm: runs of this size differ by about ±" in found["words"]
    assert not any(word in found["words"] for word in ("ahead", "behind", "told from noise"))


def seeded_ranks(seeds, best):
    """Ranks of twenty queries for each seed, a few of them changed."""
    return {
        str(seed): [best + (random.Random(f"{best} {seed} {i}").random() < 0.1) for i in range(20)]
        for seed in range(seeds)
    }


def test_seeds_give_verdicts_and_several_contestants_holms():
    two = {"worse": seeded_ranks(6, 3), "better": seeded_ranks(6, 1)}
    assert [row["verdict"] for row in differences(two)] == ["ahead"]
    assert [row["verdict"] for row in differences(dict(reversed(two.items())))] == ["behind"]
    assert [
        row["verdict"]
        for row in differences({name: dict([*ranks.items()][:5]) for name, ranks in two.items()})
    ] == ["open"]
    three = two | {"other": seeded_ranks(6, 2)}
    found = {(row["first"], row["second"]): row for row in differences(three)}
    row = found["better", "worse"]
    assert row["verdict"] == "open" and "Holm's for 2" in row["words"] and "7 can" in row["words"]
    one_sided = {
        (row["first"], row["second"]): row["verdict"]
        for row in differences(three, alternative="greater")
    }
    assert one_sided["better", "worse"] == one_sided["other", "worse"] == "ahead"
    bm25 = {(row["first"], row["second"]): row for row in differences(two | {"bm25": [10] * 20})}
    assert bm25["bm25", "better"]["difference"] < 0 and bm25["bm25", "better"]["seeds"] == 6
    # references are compared with each other: the later minus the earlier one
    three = differences(two | {"base": [50] * 20, "bm25": [10] * 20, "bm25_cut": [20] * 20})
    between = {(row["first"], row["second"]): row["difference"] for row in three}
    assert between["bm25", "base"] > 0 == between["bm25_cut", "base"] > between["bm25_cut", "bm25"]


def test_runs_of_one_seed_share_their_batches(play, tmp_path):
    report = play([TWO], tmp_path / "out", seeds=3)
    tokens = {}
    for seed, place in {
        42: tmp_path / "out",
        43: tmp_path / "out" / "seed-43",
        44: tmp_path / "out" / "seed-44",
    }.items():
        recipes = [
            from_toml(path.read_text()) for path in sorted((place / "runs").glob("*/recipe.toml"))
        ]
        assert {recipe.seed for recipe in recipes} == {seed} and len(recipes) == 3
        runs = [
            [line["tokens"] for line in read_log(place / "runs" / run / "metrics.jsonl")]
            for run in ("baseline-stage2", "anchor-stage2")
        ]
        assert runs[1] == runs[0][: len(runs[1])]
        tokens[seed] = tuple(runs[0])
    assert len(set(tokens.values())) == 3 and report["seeds"] == [42, 43, 44]
    mean = sum(each["anchor"][-1]["ndcg_at_10"] for each in report["by_seed"].values()) / 3
    assert report["arms"]["anchor"][-1]["ndcg_at_10"] == pytest.approx(mean)
    (row,) = (
        row
        for row in report["differences"]
        if (row["first"], row["second"]) == ("anchor", "baseline")
    )
    assert (row["seeds"], row["verdict"]) == (3, "open") and "3 seeds cannot give" in (
        tmp_path / "out" / "tournament.md"
    ).read_text()


@pytest.mark.thorough
def test_seeds_go_on_where_they_stopped(play, tmp_path):
    calls = []

    def interrupt(embedder):
        calls.append(1)
        if len(calls) == 11:  # in the second seed
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        play([TWO], tmp_path / "out", tasks=interrupt, seeds=2)
    before = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "out" / "runs").glob("*/metrics.jsonl")
    }
    assert (
        len(before) == 3
        and (tmp_path / "out" / "seed-43").is_dir()
        and not (tmp_path / "out" / "tournament.json").exists()
    )
    again = play([TWO], tmp_path / "out", tasks=interrupt, seeds=2)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again["ranks"] == play([TWO], tmp_path / "whole", seeds=2)["ranks"]
    with pytest.raises(InputError, match="another alternative"):
        play([TWO], tmp_path / "out", tasks=interrupt, seeds=2, alternative="greater")
    with pytest.raises(InputError, match="seeds = 0"):
        play([TWO], tmp_path / "none", seeds=0)


@pytest.mark.parametrize(
    ("recipes", "changes", "message"),
    [
        (["quickstart", "no_such_recipe"], {}, "no recipe 'no_such_recipe'"),
        (
            ["quickstart", "smollm2-135m/gircse"],
            {"gircse": "seed=1"},
            "`seed` differs: 42 in primed/stage2, 1 in gircse/gircse",
        ),
        (["quickstart", "smollm2-135m/gircse"], {"gircse": "data=other.jsonl"}, "`data` differs"),
        (["quickstart", "smollm2-135m/gircse"], {"gircse": "base=other"}, "`base` differs"),
    ],
)
def test_unequal_footing_is_refused(recipes, changes, message):
    given = [
        load_recipe(name, [changes[name.rpartition("/")[2]]])
        if name.rpartition("/")[2] in changes
        else name
        for name in recipes
    ]
    with pytest.raises(InputError, match=message):
        contestants(given)


def test_budgets_that_buy_nothing(play, tmp_path):
    for changes, message in (
        ({"amount": 1, "every": 1}, "anchor: the budget of 1 leaves 0 for `stage2`"),
        (
            {"budget": "flops", "amount": 10.0, "every": 5.0},
            "baseline: the budget of 10 leaves 10 for `stage2`, where a step takes",
        ),
        ({"budget": "pairs"}, "must be one of steps, flops, seconds"),
        ({"amount": 0}, "amount = 0"),
        ({"amount": 2.5, "every": 1}, "two whole numbers of steps"),
        ({"amount": 2, "every": 4}, "`every` not above `amount`"),
    ):
        with pytest.raises(InputError, match=message):
            play(THREE, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()  # so that a better budget can be named


def test_begun_otherwise(played, play):
    out, _ = played
    with pytest.raises(
        InputError,
        match="baseline began with another amount and another every; choose another --out",
    ):
        play(THREE, out, amount=8, every=4)
    with pytest.raises(InputError, match="began with another heldout"):
        play(THREE, out, pairs=SplitPairs(PAIRS.train, ROWS[:10], {}))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The same pairs in a file."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"query": row.query, "positive": row.positive}) + "\n" for row in ROWS)
    )
    (path.parent / "two.toml").write_text(TWO.to_toml())
    return path


def words(base, file, *more):
    """Arguments of a small tournament."""
    settings = [*small(base), f"data={file}", *more]
    return [
        "tournament",
        "--recipes",
        str(file.parent / "two.toml"),
        "smollm2-135m/gircse",
        "--amount",
        "4",
        "--every",
        "2",
        "--heldout",
        "8",
        *(w for s in settings for w in ("--set", s)),
    ]


def test_command_line(base, file, tmp_path, capsys):
    assert main([*words(base, file), "--out", str(tmp_path / "out")]) == 0
    assert (
        "against baseline" in capsys.readouterr().err
        and (tmp_path / "out" / "tournament.json").exists()
    )
    assert main(["soft-tokens", str(tmp_path / "out" / "gircse"), "--refine-steps", "3", "--data", str(file), "--heldout", "8",
                 "--plot", str(tmp_path / "sweep.svg"), "--out", str(tmp_path / "sweep.json"), "--note", "tried"]) == 0  # fmt: skip
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = json.loads((tmp_path / "sweep.json").read_text())
    other = ["--data", str(file), "--heldout", "8", "--seed", "7"]
    assert main(["soft-tokens", str(tmp_path / "out" / "gircse"), *other]) != 0
    assert "not with these held out" in capsys.readouterr().err
    assert [
        {name: round(row[name], 4) for name in row if name != "ranks"} for row in kept["steps"]
    ] == rows
    assert (
        kept["about"]["note"] == "tried"
        and kept["runs"][0]["recipe"]["objective"] == "refinement"
        and [*kept["seconds"]] == ["0", "1", "2", "3"]
    )
    assert (
        [row["steps"] for row in rows] == [0, 1, 2, 3]
        and rows[1]["gain"] == 0
        and (tmp_path / "sweep.svg").read_text().count("<svg") == 1
    )
    assert "has no soft tokens to sweep" in failure(
        capsys, "soft-tokens", tmp_path / "out" / "baseline", "--data", file
    )
    assert "--refine-steps 0: must be at least 1" in failure(
        capsys, "soft-tokens", tmp_path / "out" / "gircse", "--refine-steps", 0
    )


def test_command_line_refuses(base, file, tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    assert "no recipe 'stage7'" in failure(
        capsys, "tournament", "--recipes", "quickstart", "stage7", "--amount", 4, *out
    )
    assert "`base` differs" in failure(
        capsys, "tournament", "--recipes", "quickstart", "stage1", "--amount", 4, *out
    )
    assert "the budget of 1e-06 leaves" in failure(
        capsys, *words(base, file), "--budget", "flops", "--amount", 1e-6, "--every", 1e-6, *out
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def same_method(tmp_path_factory):
    """(folder, report) of sixteen runs of one method."""
    out = tmp_path_factory.mktemp("aa")
    return out, same_method_runs(out, runs=16, say=lambda text: None)


@pytest.mark.thorough
def test_a_method_is_not_told_from_itself_and_a_planted_difference_is_found(
    same_method, tmp_path, capsys
):
    out, _ = same_method
    asked = ["--runs-dir", out, "--tournaments", 60, "--runs", 16, "--out", tmp_path / "aa.json"]
    assert main(["aa-check", *map(str, asked)]) == 0
    record = json.loads((tmp_path / "aa.json").read_text())
    assert json.loads(capsys.readouterr().out)["same"] == record["same"]
    assert len(set(record["runs"])) > 8, "the runs must differ"
    assert record["same"]["ahead"] + record["same"]["behind"] <= 5  # 8 % of 60
    assert record["different"]["ahead"] >= 48 and record["different"]["behind"] == 0
    assert {"command", "commit", "device", "created"} <= record["about"].keys()


@pytest.mark.thorough
def test_queries_alone_tell_a_method_from_itself_and_seeds_do_not(same_method):
    _, report = same_method
    figures = seed_figures(report, "baseline")
    verdicts = [
        paired_bootstrap(one, other, samples=1000).verdict
        for i, one in enumerate(figures)
        for other in figures[:i]
    ]
    assert verdicts.count("level") < 0.8 * len(
        verdicts
    )  # intervals over the queries of one run each
    assert sum(one.verdict != "level" for one in against_itself(report, 50)) <= 4
