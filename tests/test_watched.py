"""What Stage I measures beside its loss, on which pairs, and what it compares it with."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest

from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.examples import Example, draw_different, same_text
from anchor_embedding.model.loading import load_decoder
from anchor_embedding.objectives.ceiling import anchor_ceiling, separator_ids
from anchor_embedding.objectives.reconstruction import anchor_gain
from anchor_embedding.train.loop import watched_batch
from anchor_embedding.train.prepare import make_data, prepare_tokenizer
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.stage import WATCHED, open_run, train


def quiet(text):
    pass


def recipe(base, **settings):
    usual = dict(
        name="run",
        objective="reconstruction",
        data="-",
        steps=3,
        batch_size=8,
        warmup_steps=1,
        learning_rate=1e-2,
        max_length=40,
    )
    return Recipe(
        base=str(base), **{**usual, "dtype": "float32", "anchor_gain_every": 2, **settings}
    )


def lines_and_card(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "card.json").read_text())


def by_hand(stage, watched):
    """Gain and ceiling of these pairs, for the untouched base."""
    tokenizer = prepare_tokenizer(stage, stage.base)
    batch = tokenize_batch(watched, tokenizer, Instructions.none(), hard_negatives=0)
    objective = stage.objective.prepared(tokenizer)
    decoder = load_decoder(stage.base).eval()
    ceiling = anchor_ceiling(decoder, batch, separator_ids(tokenizer), tokenizer.template.opening)
    return anchor_gain(objective, decoder, batch), {
        name: ceiling[name].saving for name in ("q2d", "d2q")
    }


def check(stage, folder, watched):
    lines, card = lines_and_card(folder)
    gain, ceiling = by_hand(stage, watched)
    assert [line["step"] for line in lines if "mean_cosine" in line] == [1, 2, 3]
    assert {name: lines[0][name] for name in gain} == pytest.approx(gain, rel=1e-4, abs=1e-5)
    final, _ = by_hand(stage.replace(base=str(folder / "final")), watched)
    assert {name: lines[-1][name] for name in final} == pytest.approx(final, rel=1e-4, abs=1e-5)
    assert card["ceiling"] == pytest.approx(ceiling, rel=1e-4, abs=1e-5)
    for name, nats in card["ceiling"].items():
        for line in lines:
            share = line[f"anchor_gain_{name}"] / nats if nats > 0 else None
            assert line.get(f"share_of_ceiling_{name}") == (
                share and pytest.approx(share, rel=1e-6)
            )
    return card


def test_no_watched_pair_has_a_text_that_is_trained_on(base, examples):
    stage = recipe(base)
    tokenizer = prepare_tokenizer(stage, stage.base)
    rows = [replace(e, positive=examples[row // 2].positive) for row, e in enumerate(examples)]
    shouted = [replace(e, query=e.query.upper(), positive=f" {e.positive}") for e in examples]
    # rows twice; several queries with one positive; the same text written in another way
    for some in (examples * 2, rows, examples + shouted):
        data = make_data(stage, tokenizer, some)
        taken = [some[row] for step in range(3) for row in data.plan.step(step)]
        texts = {same_text(text) for pair in taken for text in (pair.query, pair.positive)}
        unseen = [some[row] for row in data.unseen(3, len(some))]
        assert unseen and texts.isdisjoint(
            same_text(text) for pair in unseen for text in (pair.query, pair.positive)
        )


def test_pairs_that_the_run_does_not_train_on(base, examples, tmp_path):
    stage = recipe(base)
    data = make_data(stage, prepare_tokenizer(stage, stage.base), examples)
    trained = {row for step in range(3) for row in data.plan.step(step)}
    unseen = data.unseen(3, WATCHED)
    watched = draw_different([examples[row] for row in data.unseen(3, 16 * 8)], 8, stage.seed)
    assert (
        len(trained) == 24
        and set(unseen) == set(range(40)) - trained
        and data.unseen(3, 5) == data.unseen(3, 5) != unseen
    )
    train(stage, tmp_path / "run", examples, progress=False, say=quiet)
    assert (
        check(stage, tmp_path / "run", watched)["watched"]
        == "8 pairs that the run does not train on"
    )


def test_pairs_that_the_caller_holds_out(base, examples, tmp_path):
    train(
        recipe(base),
        tmp_path / "run",
        examples[:30],
        progress=False,
        say=quiet,
        heldout=examples[30:],
    )
    watched = draw_different(examples[30:], 8, recipe(base).seed)
    assert check(recipe(base), tmp_path / "run", watched)["watched"] == "8 held-out pairs"


@pytest.mark.parametrize("given", [True, False])
def test_no_two_watched_pairs_share_a_passage(base, examples, tmp_path, given):
    alike = [
        Example(f"{example.query} {n}", example.positive, (), dataset)
        for dataset in ("a", "b")
        for example in examples[:20]
        for n in range(3)
    ]
    stage = recipe(base, steps=2)
    heldout = alike if given else None
    run = open_run(stage, tmp_path / "run", alike, say=quiet, heldout=heldout)
    run.close()
    assert len(run.watched) == len({pair.positive for pair in run.watched}) == 8
    assert [pair.dataset for pair in run.watched] == sorted(pair.dataset for pair in run.watched)
    assert run.watched != sorted(run.watched, key=alike.index)
    same = [Example(f"{n}", "the passage") for n in range(12)]
    run = open_run(stage, tmp_path / "same", examples, say=quiet, heldout=same)
    run.close()
    assert run.watched == [] and "too few different pairs" in run.card["watched"]


def test_other_watched_pairs_have_no_ceiling(base, examples, tmp_path):
    """Resumed without its held-out pairs, a run watches others, whose ceiling is not known."""
    stage = recipe(base, anchor_gain_every=1, checkpoint_every=1)
    seen = []
    for heldout in (examples[30:], None):
        resumed = (tmp_path / "run").exists()
        given = {"progress": False, "say": seen.append, "heldout": heldout, "resume": resumed}
        train(stage, tmp_path / "run", examples[:30], **given)
        if not resumed:
            for name in ("final", "step-000003", "step-000002"):
                shutil.rmtree(tmp_path / "run" / name)
    lines, card = lines_and_card(tmp_path / "run")
    assert ["share_of_ceiling_q2d" in line for line in lines] == [True, False, False]
    assert all("anchor_gain_q2d" in line for line in lines) and card["ceiling"] == {}
    assert [line for line in seen if "other pairs are watched" in line]


def test_processes_share_the_pairs_that_are_watched(base, examples, tmp_path):
    run = open_run(recipe(base), tmp_path / "run", examples[:30], say=quiet, heldout=examples[30:])
    run.close()
    whole = [text.ids for text in watched_batch(run, 0, 1).queries]
    parts = [[text.ids for text in watched_batch(run, rank, 3).queries] for rank in range(3)]
    assert len(whole) == 8 and [len(part) for part in parts] == [3, 3, 2]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    # a pair keeps its own one of two instructions that alternate
    table = {pair.dataset: ("Find the rest", "Go on") for pair in run.watched}
    run.data = replace(run.data, instructions=Instructions("two", table))
    told = [text.ids for text in watched_batch(run, 0, 1).queries]
    parts = [[text.ids for text in watched_batch(run, rank, 3).queries] for rank in range(3)]
    assert told != whole and sorted(itertools.chain(*parts)) == sorted(told)


def test_a_run_through_all_of_its_pairs_says_so(base, examples, tmp_path):
    train(recipe(base, steps=5), tmp_path / "run", examples, progress=False, say=quiet)
    lines, card = lines_and_card(tmp_path / "run")
    assert card["watched"].startswith("the batch that is trained on next") and card["ceiling"] == {}
    assert [line["step"] for line in lines if "anchor_gain_q2d" in line] == [1, 2, 4, 5]
    assert not any("share_of_ceiling_q2d" in line for line in lines)


def test_nothing_is_measured_where_nothing_is_asked_for(base, examples, tmp_path):
    for settings in ({"anchor_gain_every": 0}, {"objective": "language_model"}):
        asked = {} if "objective" in settings else settings
        stage = recipe(base).replace(**settings) if not asked else recipe(base, **asked)
        train(stage, tmp_path / stage.objective.name, examples, progress=False, say=quiet)
        lines, card = lines_and_card(tmp_path / stage.objective.name)
        assert (card["watched"], card["ceiling"]) == ("", {}) and not any(
            "mean_cosine" in line for line in lines
        )


def test_a_run_that_goes_on_keeps_its_ceiling(base, examples, tmp_path):
    stage = recipe(base, checkpoint_every=2)
    train(stage, tmp_path / "run", examples, progress=False, say=quiet)
    before = lines_and_card(tmp_path / "run")[1]["ceiling"]
    for name in ("final", "step-000003"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    run = open_run(stage, tmp_path / "run", examples, resume=True, say=quiet)
    run.close()
    assert run.first == 2 and run.card["ceiling"] == before and before


def test_what_is_too_long_for_a_ceiling_is_said(base, examples, tmp_path):
    said = []
    long = recipe(base, max_length=520)
    texts = [type(example)(example.query * 60, example.positive * 60) for example in examples[:20]]
    train(
        long.replace(batch_size=2, steps=2),
        tmp_path / "run",
        texts,
        progress=False,
        say=said.append,
    )
    assert any("the gain is shown without its ceiling: " in line for line in said)
    assert "anchor_gain_q2d" in lines_and_card(tmp_path / "run")[0][0]


def test_the_line_of_a_step_has_the_figures_after_it(base, examples, tmp_path):
    gains = {}
    for name, every, steps in (("each", 1, 2), ("second", 2, 2), ("one", 1, 1)):
        stage = recipe(base, anchor_gain_every=every, steps=steps, schedule_steps=2)
        given = {"progress": False, "say": quiet, "heldout": examples[30:]}
        train(stage, tmp_path / name, examples[:30], **given)
        lines, _ = lines_and_card(tmp_path / name)
        gains[name] = [line["anchor_gain_d2q"] for line in lines]
    before, last = gains["second"]
    assert gains["each"][1] == last and gains["one"] == gains["each"][:1] != [before]
