"""The shipped recipes have the numbers of the paper and of its released configurations, which are
repeated here.
"""

import socket
import tomllib
from unittest import mock

import pytest
import torch

from anchor_embedding.train.cost import trained_parameters
from anchor_embedding.train.pipeline import Pipeline, from_toml
from anchor_embedding.train.plan import Plan, plan, verdicts
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.recipe_files import (
    deviations,
    load_recipe,
    recipe_table,
    shipped_recipes,
)

BASES = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}
ALL = {name: load_recipe(name) for name in shipped_recipes()}
STAGES = {name: recipe for name, recipe in ALL.items() if isinstance(recipe, Recipe)}

# sections 4.1 and A.2; warm-up, dropout and the number of hard negatives from the released
# configurations
COMMON = dict(batch_size=512, warmup_steps=300, schedule_steps=0, max_length=512, pooling="eos", template="auto", sampling=(),
              weight_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8, max_grad_norm=1.0, seed=42, data="cache/echo-data")  # fmt: skip
STAGE1 = COMMON | dict(objective="reconstruction", tuning="full", instructions="none", steps=2000, learning_rate=4e-5,
                       alpha=0.2, predict_eos=False, decode_opening="encode")  # fmt: skip
STAGE2 = COMMON | dict(
    objective="contrastive", tuning="lora", instructions="paper", steps=1000, learning_rate=2e-4, temperature=0.05,
    hard_negatives=1, negatives_pool=0, mask_same_text=False, false_negative_margin=None, matryoshka=(), symmetric_loss=False,
    same_side_negatives=False, lora_rank=16, lora_alpha=32, lora_dropout=0.05, prompt="Instruct: {instruction}\nQuery: {text}",
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip

# the released configurations at 8 devices: pairs per device, accumulated passes; none was released
# for Mistral
RELEASED = {
    "llama-3.2-1b": {"stage1": (32, 2), "stage2": (128, 1), "baseline": (64, 1)},
    "qwen2.5-1.5b": {"stage1": (32, 4), "stage2": (128, 1), "baseline": (128, 1)},
    "llama-3.2-3b": {"stage1": (16, 8), "stage2": (64, 2), "baseline": (64, 2)},
    "mistral-7b": {"stage1": (1, 64), "stage2": (32, 4), "baseline": (32, 4)},
    "llama-3.1-8b": {"stage1": (1, 64), "stage2": (32, 4), "baseline": (32, 4)},
}


def differing(recipe, values):
    found = recipe.settings()
    return {key: found[key] for key, value in values.items() if found[key] != value}


@pytest.mark.parametrize("name", ALL)
def test_every_shipped_recipe_loads_and_round_trips(name):
    recipe = ALL[name]
    assert recipe.name == name and 0 < len(recipe.description) < 120
    text = recipe.to_toml()
    assert from_toml(text) == recipe and "extends" not in text
    assert from_toml(text).to_toml() == text


def test_every_stage_of_every_model_is_shipped():
    expected = {
        f"{model}/{stage}{twin}"
        for model in BASES
        for stage in ("stage1", "stage2", "baseline")
        for twin in ("", "_as_released")
    }
    assert expected | {"stage1", "stage2", "baseline", "quickstart"} <= set(ALL)
    table = recipe_table()
    assert all(name.rpartition("/")[2] in table for name in ALL) and all(
        f"\n{model}/\n" in table for model in BASES
    )
    assert list(ALL)[:4] == ["baseline", "quickstart", "stage1", "stage2"]
    assert "llama-3.1-8b" not in recipe_table(
        "llama-3.2-1b/"
    ) and "stage1_as_released" in recipe_table("llama-3.2-1b/")


@pytest.mark.parametrize("model", ["", *BASES])
def test_numbers_of_the_paper(model):
    folder, base = (f"{model}/", BASES[model]) if model else ("", BASES["llama-3.2-1b"])
    wanted = {
        "stage1": STAGE1 | {"base": base},
        "stage2": STAGE2 | {"base": f"runs/{folder}stage1/final"},
        "baseline": STAGE2 | {"base": base},
    }
    for stage, values in wanted.items():
        assert differing(ALL[folder + stage], values) == {}
        assert deviations(ALL[folder + stage]) == {}


@pytest.mark.parametrize("model", BASES)
@pytest.mark.parametrize("stage", ["stage1", "stage2", "baseline"])
def test_as_released_differs_from_its_twin_as_stated(model, stage):
    ours = ALL[f"{model}/{stage}"]
    theirs = ALL[f"{model}/{stage}_as_released"]
    pairs, passes = RELEASED[model][stage]
    batch = pairs * passes * 8
    wanted = {
        "template": "released",
        "instructions": "as_released",
        "prompt": "{instruction}; {text}",
        "batch_size": batch,
    }
    wanted["schedule_steps"] = 3 * 1_500_000 // batch
    if stage == "stage1":
        wanted |= {"objective": "released", "micro_batch_size": pairs}
    else:
        wanted |= {"temperature": 0.02, "negatives_pool": 0 if passes == 1 else pairs * 8}
    if stage == "stage2":
        wanted["base"] = f"runs/{model}/stage1_as_released/final"
    here = ours.settings()
    wanted = {
        key: (here.get(key), value) for key, value in wanted.items() if here.get(key) != value
    }
    assert ours.differences(theirs) == wanted
    assert deviations(theirs).keys() == wanted.keys() - {"base"}


def test_share_of_the_peak_rate_at_the_reported_steps():
    """At the number of steps that the paper reports, the released schedules are far from their end."""
    shares = {}
    for name, recipe in STAGES.items():
        objective = recipe.settings()["objective"]
        if name.endswith("_as_released") and objective != "refinement":
            left = (recipe.schedule_steps - recipe.steps) / (
                recipe.schedule_steps - recipe.warmup_steps
            )
            shares[objective, recipe.batch_size] = round(100 * left)
    assert shares == {
        ("released", 512): 80,
        ("released", 1024): 58,
        ("contrastive", 512): 92,
        ("contrastive", 1024): 83,
    }


@pytest.mark.parametrize("name", [name for name in STAGES if STAGES[name].base.startswith("runs/")])
def test_stage2_starts_from_a_shipped_stage1(name):
    start = ALL[STAGES[name].base.removeprefix("runs/").removesuffix("/final")]
    assert (
        start.settings()["objective"] != "contrastive"
        and STAGES[name].settings()["objective"] == "contrastive"
    )


ABLATIONS = {"only_q2d": 1.0, "only_d2q": 0.0, "alpha_0.5": 0.5, "alpha_0.8": 0.8}  # Tables 3 and 4


@pytest.mark.parametrize("name", ABLATIONS)
def test_objective_ablations_change_alpha_alone(name):
    stage1, stage2 = (ALL[f"llama-3.2-1b/{name}_{stage}"] for stage in ("stage1", "stage2"))
    assert ALL["llama-3.2-1b/stage1"].differences(stage1) == {"alpha": (0.2, ABLATIONS[name])}
    assert ALL["llama-3.2-1b/stage2"].differences(stage2) == {
        "base": ("runs/llama-3.2-1b/stage1/final", f"runs/llama-3.2-1b/{name}_stage1/final")
    }


def test_longer_baseline():
    """Table 5."""
    assert ALL["llama-3.2-1b/baseline"].differences(ALL["llama-3.2-1b/baseline_3000_steps"]) == {
        "steps": (1000, 3000)
    }


def test_early_stages():
    """Table 9: both arms of three models, and the two ablated ones of the smallest; every 25 steps
    up to 125 of the whole schedule.
    """
    early = {name: recipe for name, recipe in STAGES.items() if "/early_" in name}
    arms = {"llama-3.2-1b": ["stage2", "baseline", "only_q2d_stage2", "only_d2q_stage2"],
            "llama-3.2-3b": ["stage2", "baseline"], "llama-3.1-8b": ["stage2", "baseline"]}  # fmt: skip
    assert set(early) == {f"{model}/early_{arm}" for model, names in arms.items() for arm in names}
    for name, recipe in early.items():
        whole = ALL[name.replace("early_", "")]
        assert whole.differences(recipe) == {
            "steps": (1000, 125),
            "schedule_steps": (0, 1000),
            "checkpoint_every": (500, 25),
        }


def test_long_runs_keep_checkpoints():
    """A shipped run of 500 steps or more that is killed does not have to begin again."""
    runs = dict(STAGES)
    for name, shipped in ALL.items():
        if isinstance(shipped, Pipeline):
            runs |= {
                f"{name}: {arm}/{stage.name}": stage
                for arm in shipped.arms
                for stage in shipped.arm(arm)
            }
    long = {name: run for name, run in runs.items() if run.steps >= 500}
    assert len(long) > 20
    assert [name for name, run in long.items() if not 0 < run.checkpoint_every < run.steps] == []


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.2-3b"])
def test_training_stages(model):
    """Table 10: each stage alone and both; the untouched model is evaluated with every pipeline."""
    pipeline = ALL[f"{model}/training_stages"]
    assert isinstance(pipeline, Pipeline) and pipeline.base == BASES[model]
    assert pipeline.arms == {
        "stage1": ("stage1",),
        "baseline": ("stage2",),
        "anchor": ("stage1", "stage2"),
    }
    for stage, single in {"stage1": "stage1", "stage2": "baseline"}.items():
        changed = pipeline.stages[stage].differences(ALL[f"{model}/{single}"])
        assert {key: before for key, (before, _) in changed.items()} in ({}, {"eval_every": 250})


def test_every_shipped_pipeline_evaluates_its_arms():
    pipelines = [one for one in ALL.values() if isinstance(one, Pipeline)]
    assert len(pipelines) > 5 and all(one.evaluation.every for one in pipelines)


def test_files_say_where_their_numbers_are_from():
    from anchor_embedding.train import recipe_files

    folder = recipe_files.files("anchor_embedding") / "recipes"
    for name, file in recipe_files._files(folder):
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), f"{name}: no comment names the source of its numbers"
        assert tomllib.loads(text)["name"] == name


@pytest.mark.parametrize("name", ALL)
def test_every_shipped_recipe_fits_eight_gpus_of_80_gb(name):
    made = plan(ALL[name], processes=8, gpus=["A100-80GB"])
    for run in [made] if isinstance(made, Plan) else made.runs.values():
        assert verdicts(run) == {80e9: "fits in 80 GB"}


@pytest.fixture
def neither_weights_nor_a_network(monkeypatch):
    "Modules can be built from sizes alone, on the meta device."
    register = torch.nn.Module.register_parameter

    def only_sizes(module, name, weight):
        if weight is not None and not weight.is_meta:
            raise OSError("weights are not needed")
        register(module, name, weight)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", only_sizes)
    monkeypatch.setattr(socket, "socket", mock.Mock(side_effect=OSError("nor is a network")))


@pytest.mark.usefixtures("neither_weights_nor_a_network")
def test_planning_needs_neither_weights_nor_a_network():
    with pytest.raises(OSError, match="weights are not needed"):
        torch.nn.Linear(1, 1)
    recipe = load_recipe("llama-3.1-8b/stage2")
    assert plan(recipe, 8).tokens.negatives == 1


GIRCSE = {"qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B", "qwen2.5-7b": "Qwen/Qwen2.5-7B", "mistral-7b": "mistralai/Mistral-7B-v0.1",
          "smollm2-135m": "SmolLM2-135M-Instruct"}  # fmt: skip
SOFT_TOKENS = dict(objective="refinement", tuning="lora", refine_steps=5, pooling="mean", soft_token_temperature=1.0, soft_token_kind="mixture",
                   add_eos=True, mask_unused_rows=True, temperature=0.02, regularizer_weight=1.0, detach_regularizer=True, lora_rank=16,
                   lora_alpha=64)  # fmt: skip


@pytest.mark.parametrize("model", GIRCSE)
def test_gircse(model):
    """The method's own numbers are used everywhere; everything else is the baseline's, or that of
    the released code.
    """
    ours = ALL[f"{model}/gircse"]
    released = ALL[f"{model}/gircse_as_released"]
    assert differing(ours, SOFT_TOKENS | {"base": GIRCSE[model]}) == {}
    as_released = dict(
        base=GIRCSE[model], data="cache/bge-full-data", template="plain", prompt="Instruct: {instruction}\nQuery:{text}", add_eos=False,
        mask_unused_rows=False, detach_regularizer=False,
        regularizer_floor=1e-8, batch_size=16, negatives_pool=2, hard_negatives=1, steps=12500, warmup_steps=375,
        schedule_steps=0, learning_rate=1e-5, lora_dropout=0.1,
    )  # fmt: skip
    assert differing(released, SOFT_TOKENS | as_released) == {}
    if model != "smollm2-135m":
        same = {**STAGE2, "objective": "refinement"} | {
            key: SOFT_TOKENS[key] for key in STAGE2 if key in SOFT_TOKENS
        }
        assert differing(ours, same) == {}
        assert deviations(ours) == {}
    assert "add_eos" in deviations(released) and "refine_steps" not in deviations(released)


@pytest.mark.parametrize("kind", ["mixture", "pause"])
def test_planned_parameters_of_refinement(kind):
    """Rank 16 on the seven maps of every layer, in millions; the control adds K vectors."""
    for model, (millions, width) in {
        "qwen2.5-0.5b": (8.80, 896),
        "qwen2.5-7b": (40.37, 3584),
        "mistral-7b": (41.94, 4096),
    }.items():
        recipe = ALL[f"{model}/gircse"].replace(soft_token_kind=kind)
        trained = trained_parameters(recipe, plan(recipe, processes=1).shape) - (
            5 * width if kind == "pause" else 0
        )
        assert round(trained / 1e6, 2) == millions
