"""The controls of Stage I as recipes: shuffled anchors and a language model, each compared with a
loop over pairs on an untouched model.
"""

import json
import tomllib

import pytest
import torch
import torch.nn.functional as F

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model
from anchor_embedding.data.examples import Example
from anchor_embedding.train.prepare import make_data, prepare_tokenizer
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.stage import dry_run, train

SETTINGS = dict(
    name="control",
    data="-",
    steps=6,
    batch_size=8,
    warmup_steps=1,
    learning_rate=1e-2,
    max_length=40,
    dtype="float32",
)


def quiet(text):
    pass


def recipe(base, **settings):
    return Recipe(base=str(base), **{"objective": "reconstruction", **SETTINGS, **settings})


def first_batch(stage, examples):
    """The examples of the first step in the order of the plan, and the tokenizer."""
    tokenizer = prepare_tokenizer(stage, stage.base)
    data = make_data(stage, tokenizer, examples)
    return [examples[row] for row in data.plan.step(0)], tokenizer


@torch.no_grad()
def shuffled_naively(chosen, tokenizer):
    """Every text is decoded from the anchor of another pair: that of the query before it, or of the
    document after it.
    """
    model = tiny_model("llama")
    opening = torch.tensor(tokenizer.template.opening)
    embed = model.get_input_embeddings()

    def loss(source, target):
        source, target = tokenizer([source, target])
        anchor = model.base_model(input_ids=torch.tensor([source.ids])).last_hidden_state[0, -1:]
        rows = torch.cat([embed(opening), anchor, embed(torch.tensor(target.body))])
        logits = model(inputs_embeds=rows[None]).logits[0, len(opening) : -1]
        return F.cross_entropy(logits, torch.tensor(target.body), reduction="sum").item(), len(
            target.body
        )

    sums = {}
    number = len(chosen)
    following = [(chosen[i], chosen[(i + 1) % number]) for i in range(number)]
    sums["q2d"] = [loss(pair.query, other.positive) for pair, other in following]
    sums["d2q"] = [loss(other.positive, pair.query) for pair, other in following]
    return {
        name: sum(nats for nats, _ in each) / sum(tokens for _, tokens in each)
        for name, each in sums.items()
    }


@pytest.mark.parametrize("budget", [60, 10_000])
def test_shuffled_anchors_are_those_of_other_pairs(base, examples, budget):
    stage = recipe(base, anchor="shuffled", token_budget=budget)
    expected = shuffled_naively(*first_batch(stage, examples))
    found = dry_run(stage, examples, say=quiet)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert found["loss"] == pytest.approx(0.2 * expected["q2d"] + 0.8 * expected["d2q"], rel=1e-4)
    own = dry_run(stage.replace(anchor="own"), examples, say=quiet)
    assert own["tokens"] == found["tokens"] and own["loss"] != pytest.approx(
        found["loss"], rel=1e-5
    )


def test_who_is_beside_whom_does_not_depend_on_the_processes(base, examples):
    stage = recipe(base, anchor="shuffled")
    data = make_data(stage, prepare_tokenizer(stage, stage.base), examples)

    def beside(world):
        parts = [data.batch(3, rank, world) for rank in range(world)]
        return {
            tuple(q.ids): tuple(d.ids)
            for part in parts
            for q, d in zip(part.queries, part.positives, strict=True)
        }

    alone = beside(1)
    given = data.batch(3, as_given=True)
    assert beside(2) == beside(4) == alone and len(alone) == 8
    assert all(
        alone[tuple(q.ids)] != tuple(d.ids)
        for q, d in zip(given.queries, given.positives, strict=True)
    )
    assert sorted(alone.values()) == sorted(tuple(d.ids) for d in given.positives)


def test_the_gain_of_a_shuffled_run_is_that_of_its_own_pairs(base, examples, tmp_path):
    gains = {}
    for anchor in ("own", "shuffled"):
        train(
            recipe(base, anchor=anchor, anchor_gain_every=6),
            tmp_path / anchor,
            examples,
            progress=False,
            say=quiet,
        )
        gains[anchor] = json.loads(
            (tmp_path / anchor / "metrics.jsonl").read_text().splitlines()[0]
        )
    for name in ("anchor_gain_q2d", "anchor_gain_d2q", "mean_cosine"):
        # loss of the untouched model on the same pairs
        assert gains["own"][name] == gains["shuffled"][name]
    assert gains["own"]["loss"] != gains["shuffled"]["loss"]


@pytest.mark.parametrize(
    "settings",
    [{"anchor": "shuffled"}, {"objective": "language_model"}],
    ids=["shuffled", "language model"],
)
def test_controls_train_and_resume(base, examples, tmp_path, settings):
    stage = recipe(base, checkpoint_every=3, **settings)
    train(stage, tmp_path / "run", examples, progress=False, say=quiet)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    kept = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert losses[-1] < losses[0] and settings.items() <= kept.items()


def test_what_makes_no_sense_is_refused(base):
    for settings, message in [
        ({"anchor": "shuffled", "target": "itself"}, "cannot be combined with `target`"),
        ({"anchor": "shuffled", "batch_size": 1}, "shuffled among the pairs of a batch"),
        ({"anchor": "mixed"}, "must be one of own, shuffled"),
        (
            {"objective": "contrasted_reconstruction", "anchor": "shuffled"},
            "cannot be combined with the contrastive term",
        ),
        (
            {"objective": "distilled_reconstruction", "teacher": "-", "anchor": "shuffled"},
            "cannot be combined with a teacher",
        ),
        ({"objective": "language_model", "attention": "bidirectional"}, "reads causally"),
        ({"objective": "language_model", "anchor": "shuffled"}, "`anchor` belongs to objective"),
    ]:
        with pytest.raises(InputError, match=message):
            recipe(base, **settings)


def test_one_pair_beside_itself_is_no_example(base):
    same = [Example("a", "b")] * 8
    assert (
        dry_run(recipe(base, anchor="shuffled"), same, say=quiet)["loss"]
        == dry_run(recipe(base), same, say=quiet)["loss"]
    )
