"""A step waits for the device only where the training loop says so. On any machine the test looks for calls that would
wait; on a GPU, CUDA itself reports them."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from objectives_worker import CASES, batch_of
from torch.overrides import TorchFunctionMode

from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.model.bidirectional import set_attention
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.packing import ATTENTION
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.objectives import (
    contrasted_reconstruction,
    contrastive,
    reconstruction,
    released,
)
from anchor_embedding.objectives.distilled_reconstruction import DistilledReconstruction

# the loss terms, once per step
NAMED = {("reconstruction.py", "named_terms"), ("contrastive.py", "as_numbers")}
HOST = {"packing.py"}  # builds a batch before it goes to the device
READS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__int__, torch.Tensor.__bool__,
         torch.Tensor.__float__, torch.Tensor.__index__}  # fmt: skip
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def by_values(index):
    """Whether an index is a mask, whose size only the device knows, or a list, which must be
    copied.
    """
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list) or (torch.is_tensor(part) and part.dtype == torch.bool)
        for part in parts
    )


def by_index(index, value=None):
    """Whether a number is written to places that a tensor names: it is copied to the device."""
    parts = index if isinstance(index, tuple) else (index,)
    return value is not None and not torch.is_tensor(value) and any(map(torch.is_tensor, parts))


def waits(function, arguments, settings):
    """Whether a call makes the host wait for the device, given its tensors."""
    if function in READS:
        return True
    if function is torch.tensor:
        return settings.get("device") is not None
    if function is torch.Tensor.new_tensor:
        return True
    if function is torch.Tensor.to:
        to_device = any(
            isinstance(given, str | torch.device) for given in (*arguments[1:], *settings.values())
        )
        return to_device and not settings.get("non_blocking")
    if function in INDEXING:
        return by_values(arguments[1]) or by_index(*arguments[1:])
    if function in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return any(map(torch.is_tensor, arguments[1:])) and settings.get("output_size") is None
    return False


class Watch(TorchFunctionMode):
    """Records the functions of this package whose calls would wait."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if waits(function, args, kwargs or {}):
            frame = sys._getframe(1)
            while "torch" in Path(frame.f_code.co_filename).parts:
                frame = frame.f_back
            path = Path(frame.f_code.co_filename)
            if "anchor_embedding" in path.parts and path.name not in HOST:
                self.found.add((path.name, frame.f_code.co_name))
        return function(*args, **(kwargs or {}))


def taught(decoder, folder):
    """Stage I with a teacher, which is loaded before the first step."""
    tokenizer = tiny_tokenizer("smollm2")
    tokenizer.save_pretrained(folder)
    tiny_model("llama", seed=5).save_pretrained(folder)
    objective = DistilledReconstruction(teacher=str(folder), token_budget=150)
    objective = objective.prepared(TextTokenizer(tokenizer, max_length=64))
    objective.loaded(decoder)
    return objective


def prepared(case, folder, device="cpu"):
    """A model and a batch for an objective, and the objective."""
    decoder = CausalDecoder(tiny_model("llama", tied=False)).to(device).train()
    decoder.model.set_attn_implementation(ATTENTION)
    set_attention(decoder, "bidirectional" if case == "mntp" else "causal")
    objective = taught(decoder, folder) if case == "taught" else CASES[case]
    return decoder, batch_of(case), objective


def test_the_watch_sees_what_waits():
    numbers = torch.arange(4)
    code = Path(contrastive.__file__).parent / "contrastive.py"
    given = {"x": numbers, "torch": torch}
    for text in (
        "x.tolist()",
        "int(x[0])",
        "x[x > 1]",
        "x[[0, 1]]",
        "x.repeat_interleave(x)",
        "x.to('cpu')",
        "torch.tensor([1], device='cpu')",
        "x.new_tensor([1])",
        "x.clone().__setitem__(x, 7)",
        "x.clone().__setitem__((x,), 7)",
    ):
        with Watch() as watch:
            eval(compile(text, code, "eval"), given)
        assert watch.found, text
    for text in (
        "x[x]",
        "x[1:]",
        "x.clone().__setitem__(slice(1), 7)",
        "x.clone().__setitem__(x, x)",
        "x.clone().index_fill_(0, x, 7)",
        "x.repeat_interleave(x, output_size=6)",
        "x.to('cpu', non_blocking=True)",
        "x.float()",
        "torch.tensor([1])",
    ):
        with Watch() as watch:
            eval(compile(text, code, "eval"), given)
        assert not watch.found, text


@pytest.mark.parametrize("case", [*CASES, "taught"])
def test_a_step_waits_only_for_its_loss(case, tmp_path):
    decoder, batch, objective = prepared(case, tmp_path)
    with Watch() as watch:
        objective.step(decoder, batch, Accelerator(cpu=True))
    assert watch.found <= NAMED and watch.found


def unwatched(function):
    """A function that may wait."""

    def call(*arguments):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return call


@pytest.mark.cuda
@pytest.mark.parametrize("case", [*CASES, "taught"])
def test_a_step_on_cuda_waits_only_for_its_loss(case, tmp_path):
    """CUDA itself raises an error if the host waits; the step before compiles kernels and allocates
    memory.
    """
    decoder, batch, objective = prepared(case, tmp_path, "cuda")
    decoder.bfloat16()
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests are using the CPU
    accelerator = Accelerator()
    objective.step(decoder, batch, accelerator)
    named = [
        (reconstruction, "named_terms"),
        (released, "named_terms"),
        (contrastive, "as_numbers"),
    ]
    named += [(contrasted_reconstruction, "as_numbers")]
    patches = [
        mock.patch.object(room, name, unwatched(getattr(room, name))) for room, name in named
    ]
    for patch in patches:
        patch.start()
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective.step(decoder, batch, accelerator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        AcceleratorState._reset_state(reset_partial_state=True)
        for patch in patches:
            patch.stop()
