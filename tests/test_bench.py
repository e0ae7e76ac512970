"""The bench, run at small scale: packing beats padding by a wide margin, memory does not grow with
the batch, and a wrong request gives one line.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anchor_embedding.common.errors import InputError
from anchor_embedding.model.shape import known_configs, shape_from_config
from anchor_embedding.study import bench, measure, workload

RESULTS = Path(__file__).parent.parent / "nbs" / "results"
CPU = torch.device("cpu")


def quiet(text):
    pass


def fastest(rows, side):
    """Processor seconds of the fastest round, on which other programs have the least influence."""
    return min(row["cpu_seconds"] for row in rows if row["side"] == side)


@pytest.fixture(scope="module")
def request_for():
    with workload.base_model("tiny", CPU) as base:
        yield lambda pairs: bench.Request(base, CPU, "float32", pairs)


@pytest.mark.thorough
@pytest.mark.parametrize("kind,pairs,least", [("stage1", 32, 1.2), ("encode", 96, 1.4)])
def test_packed_is_faster_than_padded(request_for, monkeypatch, kind, pairs, least):
    monkeypatch.setattr(bench, "matmul_peak", lambda *_: 1e12)  # not tested here
    contest = bench.KINDS[kind](request_for(pairs))
    bench.check_exact(contest)
    rows = bench.take_turns(contest, rounds=4, say=quiet)
    ratio = fastest(rows, "textbook") / fastest(rows, "ours")
    assert ratio > least, f"{kind}: textbook took only {ratio:.2f} times as long"


def test_a_side_that_computes_something_else_is_noticed(request_for):
    contest = bench.stage1(request_for(4))
    peer = contest.sides["textbook"].__self__
    with torch.no_grad():
        peer.model.base_model.norm.weight.mul_(1.01)
    with pytest.raises(bench.Disagreement, match="textbook does not compute the same"):
        bench.check_exact(contest)


@pytest.mark.parametrize("kind", ["stage1", "encode"])
def test_bfloat16_is_compared_with_a_float32_padded_reference(request_for, kind):
    contest = bench.KINDS[kind](replace(request_for(8), dtype="bfloat16"))
    differences = bench.check_exact(contest)["textbook"]
    exact = differences["exact"]
    lower = differences["in dtype"]
    assert exact.keys() == lower.keys()
    assert all(0 < lower[key] for key in lower), "bfloat16 rounds, so nothing is exactly equal"
    if kind == "stage1":
        assert exact["loss"] < lower["loss"] < 1e-2


def test_a_step_leaves_the_weights_as_they_are(request_for):
    _, engine, pairs = bench.stage(request_for(4), "stage1")
    before = {name: p.detach().clone() for name, p in engine.decoder.named_parameters()}
    first = engine.run(pairs)
    second = engine.run(pairs)
    assert first == pytest.approx(second, rel=1e-6) and first["gradient norm"] > 0
    assert all(p.equal(before[name]) for name, p in engine.decoder.named_parameters())
    assert engine.optimizer.state, "the optimizer must have run, or the step is not complete"


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["stage1", "stage2"])
def test_memory_does_not_follow_the_batch(request_for, kind):
    _, engine, _ = bench.stage(request_for(4), kind)
    pairs = workload.drawn_pairs(engine.tokenizer.tokenizer, 256, (8, 0.5), (16, 0.5))
    added = {}
    for budget in (2048, 10**9):
        engine.objective = replace(engine.objective, token_budget=budget)
        engine.run(pairs[:4])
        added[budget] = measure.memory_added(lambda: engine.run(pairs), CPU)
    if None in added.values():
        pytest.skip("this system does not let a process reset its peak memory")
    assert added[2048] < added[10**9] / 2, added


def test_a_model_that_does_not_fit_is_refused():
    llama = shape_from_config(known_configs()["meta-llama/Llama-3.1-8B"])
    shape = replace(llama, layers=10_000)
    with pytest.raises(InputError, match="bench a smaller one"):
        workload.check_room(shape, CPU)


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"kind": "stage3"}, "unknown bench 'stage3'"),
        ({"shape": "gpt-2"}, "unknown shape 'gpt-2': known: tiny, smollm2"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"pairs": 1}, "pairs = 1"),
    ],
)
def test_wrong_requests_are_one_sentence(wrong, message):
    with pytest.raises(InputError) as caught:
        bench.bench(
            **{"kind": "stage1", "shape": "tiny", "device": "cpu", "pairs": 4, "say": quiet} | wrong
        )
    said = str(caught.value)
    assert message in said and "\n" not in said and said.count("known: ") < 2


def test_a_place_that_cannot_be_written_is_found_before_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "base_model", None)  # nothing is measured
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(InputError, match=r"cannot write .*notes/bench\.json"):
        bench.bench("stage1", "tiny", json_file=tmp_path / "notes" / "bench.json", say=quiet)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("bench_*.json")), ids=lambda path: path.stem)
def test_records_say_what_they_are(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"shape", "device", "threads", "dtype", "date", "commit", "versions"} <= record[
        "about"
    ].keys()
    assert len(bench.table(record)) == sum(len(c["sides"]) for c in record["contests"].values())
    for contest in record["contests"].values():
        for side, figures in contest["sides"].items():
            rows = [row for row in contest["rounds"] if row["side"] == side]
            seconds = [row["seconds"] for row in rows]
            assert figures["fastest"] == min(seconds) and figures["slowest"] == max(seconds)
            speed = contest["tokens"] / figures["seconds"]
            assert figures["tokens_per_second"] == pytest.approx(speed)
            shares = [contest["flops"] / row["seconds"] / row["matmul_peak"] for row in rows]
            assert figures["mfu"] == pytest.approx(statistics.median(shares))
