"""The bench, live and small: packing beats padding by a wide margin, memory does not follow the
batch, wrong requests are one line.
"""

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

from anchor_embedding.common.errors import InputError
from anchor_embedding.study import bench

RESULTS = Path(__file__).parent.parent / "nbs" / "results"
CPU = torch.device("cpu")


def quiet(text):
    pass


def fastest(rows, side):
    """Processor seconds of the fastest round: what other programs do on the machine counts least
    there.
    """
    return min(row["cpu_seconds"] for row in rows if row["side"] == side)


@pytest.fixture(scope="module")
def request_for():
    with bench.base_model("tiny", CPU) as base:
        yield lambda pairs: bench.Request(
            base, bench.shape_of(base), CPU, "float32", ("textbook", "released"), None, pairs, quiet
        )


@pytest.mark.parametrize(
    "kind,peer,pairs,least",
    [
        ("stage1", "textbook", 32, 1.2),
        ("stage1", "released", 32, 1.6),
        ("encode", "textbook", 96, 1.4),
    ],
)
def test_packed_is_faster_than_padded(request_for, kind, peer, pairs, least):
    contest = bench.KINDS[kind](request_for(pairs))[kind]
    bench.check_exact(contest)
    rows = bench.play(contest, rounds=4, say=quiet)
    ratio = fastest(rows, peer) / fastest(rows, "ours")
    assert ratio > least, f"{kind}: {peer} took only {ratio:.2f} times as long"


def test_a_side_that_computes_something_else_is_noticed(request_for):
    contest = bench.stage1(request_for(4))["stage1"]
    peer = contest.sides[1].run.func.__self__
    with torch.no_grad():
        peer.model.base_model.norm.weight.mul_(1.01)
    with pytest.raises(bench.Disagreement, match="textbook does not compute the same"):
        bench.check_exact(contest)


def test_a_step_leaves_the_weights_as_they_are(request_for):
    _, engine, pairs = bench.stage(request_for(4), "stage1")
    before = {name: p.detach().clone() for name, p in engine.decoder.named_parameters()}
    first = engine.run(pairs)
    second = engine.run(pairs)
    assert first == pytest.approx(second, rel=1e-6) and first["gradient norm"] > 0
    assert all(p.equal(before[name]) for name, p in engine.decoder.named_parameters())
    assert engine.optimizer.state, "the optimizer must have worked, or the step is not a whole one"


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_does_not_follow_the_batch():
    rows = bench.growth_by_batch(CPU, (256,))
    added = {(row["stage"], row["pairs"], row["whole"]): row["memory_added"] for row in rows}
    if None in added.values():
        pytest.skip("this system does not let a process set its high-water mark back")
    for stage in ("stage1", "stage2"):
        assert added[stage, 256, False] < added[stage, 256, True] / 2, added


def test_growth_is_told_by_length_and_data(request_for, monkeypatch):
    monkeypatch.setattr(bench, "LENGTHS", (32, 512))
    short, long = bench.growth_by_length(request_for(4), pairs=2, rounds=1)
    assert short["length"] < long["length"] == 512 and short["tokens"] < long["tokens"]
    rows = bench.growth_by_data((64, 640), rounds=1)
    assert [row["rows"] for row in rows] == [64, 640] and rows[0]["bytes"] < rows[1]["bytes"]
    with pytest.raises(InputError, match="bench a smaller one"):
        bench.check_room(
            bench.replace(bench.known_shapes()["meta-llama/Llama-3.1-8B"], layers=10_000), CPU
        )


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"kind": "stage3"}, "unknown bench 'stage3'"),
        ({"shape": "gpt-2"}, "unknown shape 'gpt-2'"),
        ({"against": ["vllm"]}, "unknown peer 'vllm'"),
        ({"kind": "stage2", "against": ["textbook"]}, "textbook has no part in stage2"),
        ({"device": "gpu"}, "device 'gpu' is not there"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"data": "no-such-folder"}, "no-such-folder"),
    ],
)
def test_wrong_requests_are_one_sentence(wrong, message):
    with pytest.raises(InputError) as caught:
        bench.bench(
            **{"kind": "stage1", "shape": "tiny", "device": "cpu", "pairs": 4, "say": quiet} | wrong
        )
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_data_folder_is_refused(tmp_path):
    with pytest.raises(InputError):
        bench.bench("stage1", "tiny", "cpu", data=str(tmp_path), say=quiet)
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    with pytest.raises(InputError, match="1 pairs, but the bench takes 32"):
        bench.bench("stage1", "tiny", "cpu", data=str(tmp_path), say=quiet)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("bench_*.json")), ids=lambda path: path.stem)
def test_records_say_what_they_are(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"shape", "device", "threads", "dtype", "date", "commit", "versions"} <= record[
        "about"
    ].keys()
    for contest in record["contests"].values():
        for side, found in contest["sides"].items():
            rows = [row for row in contest["rounds"] if row["side"] == side]
            seconds = [row["seconds"] for row in rows]
            assert found["fastest"] == min(seconds) and found["slowest"] == max(seconds)
            assert found["tokens_per_second"] == pytest.approx(contest["tokens"] / found["seconds"])
            shares = [contest["flops"] / row["seconds"] / row["matmul_peak"] for row in rows]
            assert found["mfu"] == pytest.approx(statistics.median(shares))
