"""The other pretext tasks from recipe to saved model: every objective and option trains, resumes,
and loads as it was trained.
"""

import json
import shutil
import warnings
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.data.examples import Example
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.encoders import model_revision
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.model.decoder import POOLINGS
from anchor_embedding.model.packing import ATTENTION, attention_kernel, pack, packed_forward
from anchor_embedding.study.figures import plot_anchor_gain, plot_losses
from anchor_embedding.study.pipeline import run_pipeline
from anchor_embedding.train.pipeline import Pipeline
from anchor_embedding.train.prepare import make_data, prepare_embedder
from anchor_embedding.train.recipe import Pooling, Recipe
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import dry_run, train

warnings.simplefilter("ignore", FutureWarning)
WORDS = PROSE.split()
PAIRS = [
    Example(" ".join(WORDS[i : i + 5]), " ".join(WORDS[i + 5 : i + 17])) for i in range(0, 72, 3)
]
STAGE_1_OPTIONS = dict(
    target_tokens=8, first_tokens=3, first_weight=2.0, input_dropout=0.4, anchor_gradient=2.0
)
CASES = {
    "itself": dict(objective="reconstruction", target="itself"),
    "in turn": dict(objective="reconstruction", interleave="step", alpha=0.5),
    "options": dict(
        objective="contrasted_reconstruction",
        contrastive_weight=0.5,
        contrastive_temperature=0.1,
        **STAGE_1_OPTIONS,
    ),
    "llama2vec": dict(objective="bag_of_tokens"),
    "mntp": dict(objective="mntp", attention="bidirectional", pooling="mean", mask_token="a"),
    "mntp with LoRA": dict(
        objective="mntp",
        attention="bidirectional",
        pooling="mean",
        mask_token="a",
        tuning="lora",
        lora_rank=4,
    ),
    "llm2vec": dict(
        objective="contrastive",
        attention="bidirectional",
        pooling="mean",
        tuning="lora",
        lora_rank=4,
    ),
    "echo": dict(objective="contrastive", pooling="echo_mean", tuning="lora", lora_rank=4),
    "bidirectional anchors": dict(
        objective="reconstruction", attention="bidirectional", pooling="echo_eos"
    ),
}


def quiet(text):
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", tied=False).save_pretrained(folder)
    tiny_tokenizer("smollm2").save_pretrained(folder)
    return str(folder)


def recipe(base, case, **changes):
    settings = dict(
        name="case",
        base=base,
        data="-",
        steps=6,
        batch_size=8,
        warmup_steps=1,
        learning_rate=1e-2,
        max_length=40,
    )
    return Recipe(
        **{
            **settings,
            "dtype": "float32",
            "checkpoint_every": 3,
            "token_budget": 150,
            **CASES[case],
            **changes,
        }
    )


def test_choices_are_what_the_code_has():
    assert set(get_args(Pooling)) == set(POOLINGS)


@pytest.mark.parametrize("case", CASES)
def test_trains_resumes_and_is_read_back(base, case, tmp_path):
    stage = recipe(base, case)
    final = train(stage, tmp_path / "whole", PAIRS, progress=False, say=quiet)
    metrics = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    if (
        case not in ("options", "mntp", "in turn") and stage.tuning == "full"
    ):  # two draw at random, and one trains one direction in a step
        assert dry_run(stage, PAIRS, say=quiet)["loss"] == pytest.approx(
            metrics[0]["loss"], rel=1e-4
        )

    settings = json.loads((final / "anchor_embedding.json").read_text())
    assert (settings["attention"], settings["pooling"]) == (stage.attention, stage.pooling)
    loaded = Embedder.from_pretrained(final, dtype="float32", device="cpu")
    vectors = loaded.encode([pair.query for pair in PAIRS])
    assert loaded.decoder.attention == stage.attention and np.isfinite(vectors).all()
    other = Embedder.from_pretrained(
        final, dtype="float32", device="cpu", attention="causal", pooling="eos"
    )
    if (stage.attention, stage.pooling) != ("causal", "eos"):
        assert np.abs(vectors - other.encode([pair.query for pair in PAIRS])).max() > 0.01
    if stage.attention == "bidirectional":
        both = Embedder.from_pretrained(final, dtype="float32", device="cpu", pooling="eos")
        assert model_revision(both) != model_revision(other)
        with pytest.raises(InputError, match="read this model with causal attention"):
            export_embedder(loaded, tmp_path / "exported")


def test_directions_take_turns(base, tmp_path):
    train(recipe(base, "in turn", alpha=0.4), tmp_path / "run", PAIRS, progress=False, say=quiet)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ways = [{"q2d", "d2q"} & {*json.loads(line)} for line in lines]
    assert ways == [{"d2q"}, {"d2q"}, {"q2d"}, {"d2q"}, {"q2d"}, {"d2q"}]


@pytest.mark.parametrize("case", ["options", "mntp", "in turn"])
def test_resumed_equals_uninterrupted(base, case, tmp_path):
    stage = recipe(base, case)
    whole = load_file(
        train(stage, tmp_path / "whole", PAIRS, progress=False, say=quiet) / "model.safetensors"
    )
    train(stage, tmp_path / "part", PAIRS, progress=False, say=quiet)
    for name in ("final", "step-000006"):
        shutil.rmtree(tmp_path / "part" / name)
    resumed = load_file(
        train(stage, tmp_path / "part", PAIRS, resume=True, progress=False, say=quiet)
        / "model.safetensors"
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


DROPPED = {"target": "counterpart", "input_dropout": 0.5}


@pytest.mark.parametrize("case, changes", [("mntp", {}), ("itself", DROPPED)])
def test_masks_depend_on_the_step_and_the_text_alone(base, case, changes, tmp_path):
    """Not on the size of a micro-batch, nor on the number of processes."""
    of_budgets = []
    for budget in (40, 8192):
        stage = recipe(base, case, token_budget=budget, steps=3, checkpoint_every=0, **changes)
        out = tmp_path / str(budget)
        train(stage, out, PAIRS, progress=False, say=quiet)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        of_budgets.append([json.loads(line)["loss"] for line in lines])
    assert of_budgets[0] == pytest.approx(of_budgets[1], rel=1e-4)
    embedder, _ = prepare_embedder(stage, torch.device("cpu"), say=quiet)
    data = make_data(stage, embedder.tokenizer, PAIRS)
    objective = stage.objective.prepared(embedder.tokenizer)
    names = list(objective.weights())
    decoder = embedder.decoder.train()
    with torch.no_grad():
        whole, again, later = (
            objective.sums(decoder, replace(data.batch(0), seed=data.seed(step)), names)
            for step in (0, 0, 1)
        )
        ranks = [objective.sums(decoder, data.batch(0, rank, 2), names) for rank in range(2)]
    assert torch.equal(whole, again) and not torch.equal(whole, later)
    torch.testing.assert_close(sum(ranks), whole, rtol=1e-5, atol=0)


def test_what_cannot_be_is_refused(base):
    with pytest.raises(
        InputError,
        match="needs 1199 positions, LlamaForCausalLM has 1024; set max_length to at most 512",
    ):
        prepare_embedder(recipe(base, "echo", max_length=600), torch.device("cpu"), say=quiet)
    embedder, _ = prepare_embedder(recipe(base, "mntp"), torch.device("cpu"), say=quiet)
    with pytest.raises(InputError, match="mask_token 'the ship sails' is"):
        recipe(base, "mntp", mask_token="the ship sails").objective.prepared(embedder.tokenizer)


@pytest.mark.thorough
def test_a_report_calls_every_pretext_what_it_is(base, tmp_path):
    """The shipped pipeline of pretext tasks and GIRCSE, two steps per stage, from runs to findings
    and plots.
    """
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        "".join(
            json.dumps({"query": pair.query, "positive": pair.positive}) + "\n"
            for pair in PAIRS[::4]
        )
    )
    small = [
        f"base={base}",
        f"data={data}",
        "batch_size=2",
        "max_length=40",
        "steps=2",
        "warmup_steps=1",
        "evaluation.every=2",
        "evaluation.pairs=3",
    ]
    pipeline = load_recipe(
        "smollm2-135m/pretexts",
        [*small, "mntp.mask_token=a", "auto_reconstruction.anchor_gain_every=1"],
    )
    gircse = load_recipe("smollm2-135m/gircse", [*small[:-2], "refine_steps=2"])
    pipeline = Pipeline(
        name="every",
        stages={**pipeline.stages, "gircse": gircse},
        arms={**pipeline.arms, "gircse": ("gircse",)},
        evaluation=pipeline.evaluation,
    )
    report = run_pipeline(pipeline, tmp_path / "out", progress=False, say=quiet)
    findings = "\n".join(report["findings"])
    for arm, name in [("anchor/reconstruction", "reconstruction"), ("itself/auto_reconstruction", "reconstruction"),
                      ("llama2vec/bag_of_tokens", "bag of tokens"), ("llm2vec/mntp", "masked next-token prediction")]:  # fmt: skip
        assert f"{arm}: the {name} loss went from" in findings
    assert (
        "(Q2Q) and" in findings
        and "(D2D) nats per token" in findings
        and findings.count("loss went from") == 4
    )
    assert "Stage I saw 3 pairs here, 1.3 times each, and" in findings
    assert {"mntp", "loss"} <= report["losses"]["llm2vec/mntp"][
        0
    ].keys() and "first_infonce" in report["losses"]["gircse/gircse"][0]
    titles = {axes.get_title(loc="left") for axes in plot_losses(report).axes}
    assert {
        "contrastive (InfoNCE)",
        "mntp (masked next-token prediction)",
        "bag_of_tokens (bag of tokens)",
    } <= titles
    assert (
        "gircse (refinement: mean InfoNCE of all steps)" in titles
        and len(plot_anchor_gain(report).axes[0].lines) == 3
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_both_directions_on_cuda():
    """The kernels for a packed row in half precision, compared with one text at a time in float32."""
    model = tiny_model("mistral", sliding_window=16).cuda()
    model.set_attn_implementation(ATTENTION)
    batch = pack([list(range(5, 5 + n)) for n in (40, 3, 17)], "cuda")
    with torch.no_grad():
        exact = packed_forward(model.model, batch, causal=False)
        causal = packed_forward(model.model, batch)
        coarse = packed_forward(model.bfloat16().model, batch, causal=False).float()
    assert attention_kernel("cuda", torch.bfloat16) != "grouped"
    assert (coarse - exact).norm() < 0.1 * exact.norm() < (causal - exact).norm()
