"""Two processes (gloo, CPU; DDP and FSDP2) compute the gradients and the anchor gain of one, with tied and untied heads:
contrastive with every option, released Stage I, other pretext tasks, refinement."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from objectives_worker import CASES, GAINS, HEADS, batch_of, gain, gradients, make_batch
from safetensors.torch import load_file

pytestmark = pytest.mark.thorough
WORKER = Path(__file__).with_name("objectives_worker.py")
PROCESSES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The result of every process in every case."""
    folder = tmp_path_factory.mktemp("gradients")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launch, str(WORKER), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_the_cases_differ_in_micro_batches():
    batch = make_batch()
    objective = CASES["plain"]
    needed = [
        len(objective.groups(None, batch.take(range(rank, len(batch), PROCESSES))))
        for rank in range(PROCESSES)
    ]
    assert needed == [1, 2], (
        "one process must fit its budget and the other must not, or the test shows less than it "
        "says"
    )


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_equal_one_process(folder, case, head, sharding):
    batch = batch_of(case)
    # its mean of means depends on which pairs share a micro-batch, so compare those of one process
    if case == "released":
        batch = batch.take(
            [row for rank in range(PROCESSES) for row in range(rank, len(batch), PROCESSES)]
        )
    terms, alone = gradients(case, head, batch, Accelerator(cpu=True))
    # every soft token multiplies the rounding of the one before it
    near = 1e-4 if case == "refined" else 1e-5
    for rank in range(PROCESSES):
        found = load_file(folder / f"{case}-{head}-{sharding}-{rank}.safetensors")
        assert {f"terms.{name}" for name in terms} | set(alone) == set(found)
        for name, value in terms.items():
            assert found[f"terms.{name}"].item() == pytest.approx(value, rel=1e-5), name
        for name, gradient in alone.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=near, atol=near * gradient.abs().max().item(), msg=name
            )


@pytest.mark.parametrize("case", list(GAINS))
def test_anchor_gain_of_the_global_batch(folder, case):
    """The next pair is the one in the global batch, and the sums are those of all processes, also
    if each has one pair.
    """
    alone = gain(case, Accelerator(cpu=True))
    assert all(map(math.isfinite, alone.values())) and all(value for value in alone.values())
    for rank in range(PROCESSES):
        found = json.loads((folder / f"gains-{rank}.json").read_text())[case]
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_anchor_gain_is_of_whole_texts():
    """Options of the loss do not change what is measured, so that runs can be compared."""
    accelerator = Accelerator(cpu=True)
    assert gain("options", accelerator) == pytest.approx(gain("plain", accelerator), rel=1e-5)
