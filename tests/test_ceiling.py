"""The ceiling of the anchor gain: the command compared with a plain loop over strings, in every
precision and form of model, and the inputs it refuses.
"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchor_embedding.cli.main import main
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.examples import Example
from anchor_embedding.model.loading import add_lora, load_decoder
from anchor_embedding.model.text import TextTokenizer, opening_ids
from anchor_embedding.objectives.ceiling import anchor_ceiling, separator_ids

LINES = PROSE.splitlines()
SIDES = {"q2d": ("query", "positive"), "d2q": ("positive", "query")}


@torch.no_grad()
def naive_loss(folder, rows, direction, line_break="\n"):
    """Nats per token of all targets after their own counterparts, computed from strings with
    transformers alone.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    source, target = SIDES[direction]
    total = 0.0
    tokens = 0
    for row in rows:
        front = ids("<|im_start|>user\n") + ids(row[source]) + ids(line_break)
        body = ids(row[target])
        logits = model(torch.tensor([front + body])).logits[0, len(front) - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(body), reduction="sum").item()
        tokens += len(body)
    return total / tokens


def measured(capsys, *arguments):
    assert main(["ceiling", *map(str, arguments), "--dtype", "float32"]) == 0
    return capsys.readouterr()


def test_the_command_agrees_with_a_loop_over_strings(base, pairs, tmp_path, capsys):
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    out = tmp_path / "records" / "ceiling.json"
    printed = measured(
        capsys, base, "--data", pairs, "--pairs", 99, "--token-budget", 300, "--out", out
    )
    record = json.loads(out.read_text())
    found = record["datasets"]["pairs"]
    assert record["pairs"] == {"pairs": len(rows)}
    for direction in SIDES:
        assert found[direction]["own"] == pytest.approx(naive_loss(base, rows, direction), rel=1e-4)
        nothing = [{**row, SIDES[direction][0]: ""} for row in rows]
        assert found[direction]["none"] == pytest.approx(
            naive_loss(base, nothing, direction), rel=1e-4
        )
        assert found[direction]["saving"] == found[direction]["next"] - found[direction]["own"]
        assert f"{found[direction]['saving']:.3f} [{found[direction]['low']:.3f}" in printed.out
    about = record["about"]
    assert (
        about["command"].startswith("anchor ceiling ") and "--token-budget 300" in about["command"]
    )
    assert (
        about["base"] == str(base)
        and about["dtype"] == "float32"
        and {"commit", "device", "date"} <= about.keys()
    )


def test_settings_reach_the_measurement(base, pairs, tmp_path, capsys):
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    out = tmp_path / "ceiling.json"
    measured(
        capsys,
        base,
        "--data",
        pairs,
        "--pairs",
        99,
        "--separator",
        " = ",
        "--first-tokens",
        2,
        "--max-length",
        60,
        "--out",
        out,
    )
    record = json.loads(out.read_text())
    assert (
        record["settings"] | {"separator": " = ", "first_tokens": 2, "max_length": 60}
        == record["settings"]
    )
    found = record["datasets"]["pairs"]
    assert found["q2d"]["own"] == pytest.approx(naive_loss(base, rows, "q2d", " = "), rel=1e-4)
    assert found["d2q_first_2"]["tokens"] == 2 * len(rows)
    measured(capsys, base, "--data", pairs, "--pairs", 7, "--max-length", 12, "--out", out)
    fewer = json.loads(out.read_text())
    assert fewer["pairs"] == {"pairs": 7} and fewer["datasets"]["pairs"]["q2d"]["tokens"] == 7 * (
        12 - 5
    )


def test_several_sources_are_measured_apart(base, pairs, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"query": line[:9], "positive": line[9:]}) + "\n" for line in LINES)
    )
    together = tmp_path / "together.json"
    alone = tmp_path / "alone.json"
    printed = measured(capsys, base, "--data", other, pairs, "--pairs", 6, "--out", together)
    assert [line.split()[0] for line in printed.out.splitlines()[2:]] == ["other", "pairs"]
    measured(capsys, base, "--data", pairs, "--pairs", 6, "--out", alone)
    assert (
        json.loads(together.read_text())["datasets"]["pairs"]
        == json.loads(alone.read_text())["datasets"]["pairs"]
    )


def failure(capsys, *arguments):
    assert main(["ceiling", *map(str, arguments), "--dtype", "float32"]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("anchor: ")]
    assert len(lines) == 1 and "Traceback" not in printed.err and not printed.out
    return lines[0]


def test_refused_in_one_line(base, pairs, tmp_path, capsys):
    single = tmp_path / "single.jsonl"
    single.write_text('{"query": "q", "positive": "p"}\n')
    long = tmp_path / "long.jsonl"
    rows = [{"query": PROSE * 2 + end, "positive": PROSE * 2 + end} for end in ".!"]
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "'single' gives 1" in failure(capsys, base, "--data", pairs, single)
    assert "give at least two" in failure(capsys, base, "--data", pairs, "--pairs", 1)
    assert "give each dataset once" in failure(capsys, base, "--data", pairs, pairs)
    assert "nowhere.jsonl" in failure(capsys, base, "--data", tmp_path / "nowhere.jsonl")
    assert "lower max_length" in failure(capsys, base, "--data", long, "--max-length", 900)
    assert "separator" in failure(capsys, base, "--data", pairs, "--separator", "")
    assert "cannot load model" in failure(capsys, tmp_path / "no-model", "--data", pairs)


@pytest.fixture(scope="module")
def few(base):
    """Four pairs as tokens, and a decoder's ceilings for them."""
    decoder = load_decoder(str(base))
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(base), max_length=64)
    examples = [Example(line[:20], line[20:]) for line in LINES[:4]]
    batch = tokenize_batch(examples, tokenizer, Instructions.none())
    given = batch, separator_ids(tokenizer), opening_ids("encode", tokenizer.template)
    return given, anchor_ceiling(decoder, *given)


def same(found, expected, tolerance):
    def values(ceilings):
        return [
            getattr(one, name)
            for one in ceilings.values()
            for name in ("own", "next", "none", "tokens")
        ]

    np.testing.assert_allclose(values(found), values(expected), rtol=tolerance)


def test_an_untrained_adapter_changes_nothing(base, few):
    given, expected = few
    same(anchor_ceiling(add_lora(load_decoder(str(base)), rank=4), *given), expected, 1e-5)


def test_bfloat16_is_near(base, few):
    given, expected = few
    found = anchor_ceiling(load_decoder(str(base), compute_dtype=torch.bfloat16), *given)
    same(found, expected, 0.03)
    assert found != expected
    same(anchor_ceiling(load_decoder(str(base), torch.bfloat16), *given), expected, 0.03)


def test_no_gradient_is_kept(base, few):
    given, _ = few
    decoder = load_decoder(str(base))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        anchor_ceiling(decoder, *given)
    assert not kept and all(parameter.grad is None for parameter in decoder.parameters())
