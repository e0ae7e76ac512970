"""Weights that do not fit their model: none are filled in at random; the command says what is
missing and ends with exit code 2.
"""

import json
import shutil
import warnings

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.embed.embedder import PAUSE_TOKENS, SETTINGS_FILE, Embedder, own_files
from anchor_embedding.embed.encoders import model_revision
from anchor_embedding.evaluate.candidate import describe_loaded, find_candidate
from anchor_embedding.model.base import resolve_base
from anchor_embedding.model.loading import add_lora, load_decoder
from anchor_embedding.model.packing import pack


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("what holds the ship\nthe anchor\n")
    return path


def model(folder, kind="llama", tied=True, **overrides):
    """A complete model on disk."""
    tiny_model(kind, tied=tied, **overrides).save_pretrained(folder)
    tiny_tokenizer("smollm2").save_pretrained(folder)
    return folder


@pytest.fixture
def batch():
    return pack([[5, 6, 7, 2], [9, 2]])


def change(file, function):
    """Rewrites the tensors of a file."""
    save_file(function(load_file(file)), file, {"format": "pt"})


def without(part):
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


def larger(tensors):
    return {key: 1.1 * value for key, value in tensors.items()}


def message(capsys, *arguments):
    """The one line printed by a command that must be refused."""
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 2
    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if line.startswith("anchor: ")]
    assert "Traceback" not in printed
    return line


def encoding(folder, texts, tmp_path):
    return [
        "encode",
        folder,
        "--in",
        texts,
        "--out",
        tmp_path / "vectors.npy",
        "--dtype",
        "float32",
    ]


def training(recipe, base, pairs, out, *more):
    small = [
        f"base={base}",
        f"data={pairs}",
        "batch_size=8",
        "max_length=40",
        "steps=2",
        "dtype=float32",
        "checkpoint_every=1",
        *more,
    ]
    return ["train", recipe, *[word for item in small for word in ("--set", item)], "--out", out]


CHANGES = {
    "a layer is missing": (
        without("layers.1."),
        "9 missing (model.layers.1.input_layernorm.weight",
    ),
    "every key has a prefix": (
        lambda tensors: {f"old.{key}": value for key, value in tensors.items()},
        "20 not of this model (old.model",
    ),
    "a shape is another": (
        lambda tensors: {k: v[:9] if "q_proj" in k else v for k, v in tensors.items()},
        "2 of another shape",
    ),
    "a map more": (
        lambda tensors: tensors | {"model.layers.0.mlp.extra.weight": torch.zeros(2)},
        "1 not of this model",
    ),
    "no table": (without("embed_tokens"), "missing (lm_head.weight, model.embed_tokens.weight)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_do_not_fit_are_refused(tmp_path, texts, capsys, name):
    function, expected = CHANGES[name]
    folder = model(tmp_path / "model")
    change(folder / "model.safetensors", function)
    line = message(capsys, *encoding(folder, texts, tmp_path))
    assert expected in line and str(folder) in line and "copy the whole model again" in line, line
    assert not (tmp_path / "vectors.npy").exists()


def test_more_layers_than_weights_are_refused(tmp_path, texts, capsys):
    folder = model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "9 missing (model.layers.2." in message(capsys, *encoding(folder, texts, tmp_path))


def test_buffers_of_old_checkpoints_are_no_fault(tmp_path):
    folder = model(tmp_path / "model")
    before = Embedder.from_pretrained(folder, dtype="float32").encode(["the anchor"])
    change(
        folder / "model.safetensors",
        lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    assert np.array_equal(
        before, Embedder.from_pretrained(folder, dtype="float32").encode(["the anchor"])
    )


def test_a_missing_head_is_refused_where_one_is_needed_and_nowhere_else(
    tmp_path, texts, pairs, capsys
):
    folder = model(tmp_path / "model", tied=False)
    whole = Embedder.from_pretrained(folder, dtype="float32").encode(["the anchor"])
    change(
        folder / "model.safetensors",
        lambda tensors: {
            k.removeprefix("model."): v for k, v in without("lm_head")(tensors).items()
        },
    )
    assert np.array_equal(
        whole, Embedder.from_pretrained(folder, dtype="float32").encode(["the anchor"])
    )
    assert main([str(word) for word in training("stage2", folder, pairs, tmp_path / "two")]) == 0
    # an untrained head stays absent
    for number, start in enumerate((folder, tmp_path / "two" / "final")):
        line = message(capsys, *training("stage1", start, pairs, tmp_path / f"one{number}"))
        assert "objective = 'reconstruction' needs a vocabulary head" in line, line
        assert "reading needs a vocabulary head" in message(
            capsys, "read", start, "what holds the ship", "--dtype", "float32"
        )


@pytest.mark.parametrize("function, expected", [
    (lambda tensors: dict(sorted(tensors.items())[::2]), "14 missing ("),
    (lambda tensors: tensors | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(2, 2)}, "1 not of this model ("),
    (lambda tensors: {key: value[:1] if "lora_A" in key else value for key, value in tensors.items()}, "does not fit the model: "),
], ids=["half", "more", "shape"])  # fmt: skip
def test_an_adapter_that_is_not_whole_is_refused(
    tmp_path, texts, pairs, capsys, function, expected
):
    """They are refused by `--resume` and by everything that loads the checkpoint."""
    arguments = training("stage2", model(tmp_path / "base"), pairs, tmp_path / "run")
    assert main([str(word) for word in arguments]) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "step-000002")
    kept = tmp_path / "run" / "step-000001"
    change(kept / "adapter_model.safetensors", function)
    for words in ([*arguments, "--resume"], encoding(kept, texts, tmp_path)):
        line = message(capsys, *words)
        assert expected in line and "step-000001" in line and "take another checkpoint" in line, (
            line
        )


@pytest.mark.parametrize("function, expected", [
    (without("layers.1."), "missing (model.model.layers.1."),
    (without("|exp_avg_sq"), "missing ("),
    (lambda tensors: tensors | {"model.model.layers.7.mlp.up_proj.weight|step": torch.zeros(())}, "1 not of this model ("),
    (lambda tensors: {k: v[:2] if "embed_tokens.weight|exp_avg" in k else v for k, v in tensors.items()}, "2 of another shape ("),
], ids=["layer", "entry", "more", "shape"])  # fmt: skip
def test_moments_that_are_not_whole_are_refused(tmp_path, pairs, capsys, function, expected):
    arguments = training("stage1", model(tmp_path / "base"), pairs, tmp_path / "run")
    assert main([str(word) for word in arguments]) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "step-000002")
    change(tmp_path / "run" / "step-000001" / "optimizer.safetensors", function)
    line = message(capsys, *arguments, "--resume")
    assert expected in line and "step-000001" in line and "remove" in line, line


def test_pause_tokens_of_another_number_are_refused(tmp_path, texts, pairs, capsys):
    more = ("learning_rate=1e-3", "soft_token_kind=pause", "refine_steps=3")
    out = tmp_path / "run"
    assert (
        main(
            [
                str(word)
                for word in training(
                    "smollm2-135m/gircse", model(tmp_path / "base"), pairs, out, *more
                )
            ]
        )
        == 0
    )
    change(
        out / "final" / PAUSE_TOKENS, lambda tensors: {"pause_tokens": tensors["pause_tokens"][:2]}
    )
    words = "holds 2 pause tokens, not 3: give soft tokens with steps=2, or save the model again"
    assert words in message(capsys, *encoding(out / "final", texts, tmp_path))


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache with the weights of `me/model`, of commit `one`; the hub cannot be asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--me--model"
    for part in ("refs", "snapshots/one", ".no_exist/one"):
        (folder / part).mkdir(parents=True)
    (folder / "refs/main").write_text("one")
    (folder / "snapshots/one/config.json").write_text("{}")
    return folder


def test_an_adapter_on_the_hub_has_a_revision_which_is_of_its_base_too(cached):
    folder = cached.with_name("models--me--adapter")
    for part in ("refs", "snapshots/two"):
        (folder / part).mkdir(parents=True)
    (folder / "refs/main").write_text("two")
    settings = {"base_model_name_or_path": "me/model"}
    (folder / "snapshots/two/adapter_config.json").write_text(json.dumps(settings))
    adapter = model_revision("me/adapter")
    assert model_revision("me/model") == "one" and len({adapter, "one", "two"}) == 3
    (cached / "snapshots/one").rename(cached / "snapshots/three")
    (cached / "refs/main").write_text("three")
    assert model_revision("me/adapter") != adapter
    # unless it names the commit
    settings["revision"] = "one"
    (folder / "snapshots/two/adapter_config.json").write_text(json.dumps(settings))
    pinned = model_revision("me/adapter")
    (cached / "refs/main").write_text("four")
    assert model_revision("me/adapter") == pinned
    with pytest.raises(InputError, match="there is no model 'me/nothing'"):
        model_revision("me/nothing")


def test_an_adapter_is_loaded_on_the_commit_of_its_base_that_it_was_trained_on(
    cached, tmp_path, batch
):
    first, newest = "1" * 40, "2" * 40
    for commit in (first, newest):
        model(cached / "snapshots" / commit)
    change(cached / "snapshots" / newest / "model.safetensors", larger)
    (cached / "refs/main").write_text(first)
    adapter = tmp_path / "adapter"
    decoder = add_lora(load_decoder("me/model"))
    untrained = decoder.encode(batch)
    decoder.model.save_pretrained(adapter)
    assert json.loads((adapter / "adapter_config.json").read_text())["revision"] == first
    (cached / "refs/main").write_text(newest)
    torch.testing.assert_close(load_decoder(adapter).encode(batch), untrained)
    assert not torch.allclose(load_decoder("me/model").encode(batch), untrained, atol=0.1)
    # a second adapter's base is a folder, which has no commits
    assert add_lora(load_decoder(adapter)).model.peft_config["default"].revision is None


def test_a_run_goes_on_at_the_commit_of_its_base_at_which_it_began(cached, tmp_path, pairs):
    first, newest = "1" * 40, "2" * 40
    for commit in (first, newest):
        model(cached / "snapshots" / commit)
    change(cached / "snapshots" / newest / "model.safetensors", larger)

    def train(base, out, *more):
        command = training("baseline", base, pairs, tmp_path / out, "hard_negatives=0")
        assert main([*map(str, command), *more]) == 0
        return load_file(tmp_path / out / "step-000002" / "adapter_model.safetensors")

    (cached / "refs/main").write_text(first)
    whole = train("me/model", "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for folder in ("step-000002", "final"):
        shutil.rmtree(tmp_path / "half" / folder)
    (cached / "refs/main").write_text(newest)
    for found in (train("me/model", "half", "--resume"), train(f"me/model@{first}", "pinned")):
        assert all(torch.equal(found[key], weight) for key, weight in whole.items())
    assert any(not torch.equal(train("me/model", "new")[key], whole[key]) for key in whole)
    for run in ("whole", "half", "pinned"):
        card = json.loads((tmp_path / run / "card.json").read_text())
        adapter = json.loads((tmp_path / run / "step-000002" / "adapter_config.json").read_text())
        named = (adapter["base_model_name_or_path"], adapter["revision"])
        assert card["base_revision"] == first and named == ("me/model", first)
        final = tmp_path / run / "final"
        meta, _ = describe_loaded(find_candidate(final), Embedder.from_pretrained(final), run)
        assert meta.adapted_from == "me/model"


@pytest.mark.parametrize("bin_file", [False, True], ids=["safetensors", "bin"])
def test_an_adapter_whose_base_was_trained_again_is_refused(tmp_path, texts, capsys, bin_file):
    base = model(tmp_path / "base")
    if bin_file:
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    embedder = Embedder.from_pretrained(base, dtype="float32")
    add_lora(embedder.decoder)
    adapter = tmp_path / "adapter"
    embedder.save_pretrained(adapter)
    # an adapter in a folder of another model belongs to its own base
    inner = tmp_path / "adapter" / "inner"
    embedder.save_pretrained(inner)
    assert main([str(word) for word in encoding(adapter, texts, tmp_path)]) == 0
    if bin_file:
        larger_weights = larger(torch.load(base / "pytorch_model.bin"))
        torch.save(larger_weights, base / "pytorch_model.bin")
    else:
        change(base / "model.safetensors", larger)
    (tmp_path / "link").symlink_to(adapter)
    shutil.copytree(adapter, tmp_path / "copy")
    for folder in (adapter, inner, tmp_path / "link", tmp_path / "copy"):
        assert "was trained on other weights than those that are now in" in message(
            capsys, *encoding(folder, texts, tmp_path / "again")
        )
    (adapter / SETTINGS_FILE).write_text("[]")
    with pytest.raises(InputError, match="holds no JSON object"):
        load_decoder(adapter)


def test_the_hub_is_asked_for_settings_even_if_older_ones_are_cached(cached, monkeypatch, tmp_path):
    (cached / "snapshots/one" / SETTINGS_FILE).write_text("{}")
    assert own_files("me/model") == cached / "snapshots/one"
    updated = tmp_path / "two"
    updated.mkdir()
    (updated / SETTINGS_FILE).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(updated))
    assert own_files("me/model") == updated


def test_a_model_whose_settings_are_unknown_is_read_with_a_warning(cached):
    with pytest.warns(UserWarning, match=f"me/model: the hub cannot be asked for {SETTINGS_FILE}"):
        assert own_files("me/model") == cached / "snapshots/one"
    with warnings.catch_warnings(action="error"):
        (cached / ".no_exist/one" / SETTINGS_FILE).touch()
        assert own_files("me/model") == cached / "snapshots/one"
        assert str(own_files("no model at all")) == "no model at all"


def test_a_fault_of_the_disk_is_not_taken_for_a_model_without_settings(cached, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(OSError, match="no space left"):
        own_files("me/model")


def test_a_cached_model_is_found_offline_without_the_files_that_nobody_read(cached, monkeypatch):
    def incomplete(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("README.md is not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    assert resolve_base("me/model").path == "me/model"


def test_a_comparison_begins_from_a_name_on_the_hub_and_from_an_adapter(
    cached, tmp_path, pairs, capsys
):
    model(cached / "snapshots" / "one")
    decoder = add_lora(load_decoder("me/model"))
    decoder.model.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer("smollm2").save_pretrained(tmp_path / "adapter")
    settings = ["evaluation.pairs=8", "batch_size=4", "dtype=float32"]
    for base, place in (("me/model", "of-hub"), (str(tmp_path / "adapter"), "of-adapter")):
        command = ["quickstart", "--base", base, "--data", str(pairs), "--steps", "2"]
        assert main([*command, "--out", str(tmp_path / place), "--set", *settings]) == 0
        report = json.loads((tmp_path / place / "report.json").read_text())
        assert {*report["arms"]} == {"baseline", "anchor", "primed"}
        assert "on this machine, from its speed" in capsys.readouterr().err


def test_a_run_goes_on_when_the_cache_has_more_files_of_its_commit(
    cached, tmp_path, pairs, monkeypatch
):
    commit = "1" * 40
    snapshot = model(cached / "snapshots" / commit)
    (cached / "refs/main").write_text(commit)
    asked = {}

    def fetch(name, revision=None, **patterns):
        if revision:
            asked.update(patterns)
            (snapshot / "tokenizer.model").write_bytes(b"for another tokenizer")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    command = training("baseline", "me/model", pairs, tmp_path / "run", "hard_negatives=0")
    assert main([*map(str, command)]) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    assert main([*map(str, command), "--resume"]) == 0
    names = ["model.safetensors", "tokenizer.model", "consolidated.safetensors", "original/c.pth"]
    fetched = huggingface_hub.utils.filter_repo_objects(names, **asked)
    assert [*fetched] == ["model.safetensors", "tokenizer.model"]
