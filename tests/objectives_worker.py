"""Writes the gradients of each case of test_objectives.py to a file, computed by one process or as
one of several; the anchor gain too.
"""

import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from safetensors.torch import save_file

from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.data.batches import Instructions, TokenBatch, tokenize_batch
from anchor_embedding.data.examples import Example
from anchor_embedding.model.bidirectional import set_attention
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.packing import ATTENTION
from anchor_embedding.model.ranks import shard, whole_tensors
from anchor_embedding.model.text import TextTokenizer, TokenizedText
from anchor_embedding.objectives.bag_of_tokens import BagOfTokens
from anchor_embedding.objectives.contrasted_reconstruction import ContrastedReconstruction
from anchor_embedding.objectives.contrastive import Contrastive
from anchor_embedding.objectives.language_model import LanguageModel
from anchor_embedding.objectives.mntp import MaskedPrediction
from anchor_embedding.objectives.reconstruction import Reconstruction, anchor_gain
from anchor_embedding.objectives.refinement import Refinement
from anchor_embedding.objectives.released import ReleasedReconstruction

OPTIONS = dict(
    mask_same_text=True,
    false_negative_margin=0.3,
    matryoshka=(8, 16),
    symmetric_loss=True,
    same_side_negatives=True,
)
# token budgets chosen so that some processes need several micro-batches and others only one
CASES = {
    "plain": Contrastive(token_budget=150),
    "options": Contrastive(token_budget=150, **OPTIONS),
    "pools": Contrastive(token_budget=150, negatives_pool=4),
    "released": ReleasedReconstruction(eos_id=2, micro_batch_size=2),
    "bag": BagOfTokens(token_budget=150),
    # all masked, so that nothing is left to chance
    "mntp": MaskedPrediction(mask_id=9, mask_share=1.0, token_budget=150),
    "itself": Reconstruction(
        target="itself",
        target_tokens=9,
        reduction="text_mean",
        first_tokens=3,
        first_weight=2.0,
        anchor_gradient=2.0,
        token_budget=150,
    ),
    "contrasted": ContrastedReconstruction(
        contrastive_weight=0.5, pooling="echo_mean", token_budget=150
    ),
    "language_model": LanguageModel(token_budget=150),
    "refined": Refinement(refine_steps=2, temperature=0.05, token_budget=150),
    # the last micro-batch of every process has nothing to decode
    "silent": Reconstruction(token_budget=40),
    # the second process has nothing to decode
    "one_silent": Reconstruction(token_budget=40),
}
HEADS = ("tied", "untied")
GAINS = {  # objective, pairs of the global batch
    "plain": (Reconstruction(token_budget=150), 8),
    "one pair each": (Reconstruction(token_budget=150), 2),
    "options": (
        Reconstruction(
            target_tokens=3, first_tokens=2, first_weight=3.0, predict_eos=True, token_budget=150
        ),
        8,
    ),
    # one pair each, so that padding does not depend on the other pairs
    "released": (ReleasedReconstruction(eos_id=2, micro_batch_size=1), 8),
}


def make_batch() -> TokenBatch:
    """Eight pairs, every second one long, some with hard negatives; texts repeat."""
    words = PROSE.split()
    pairs = []
    for i in range(8):
        document = " ".join(words[i % 5 : i % 5 + (3 if i % 2 == 0 else 20)])
        pairs.append(
            Example(
                " ".join(words[3 * i : 3 * i + 3]),
                document,
                (" ".join(words[-4 - i : -i - 1]),) * (i % 3 == 0),
            )
        )
    return tokenize_batch(
        pairs, TextTokenizer(tiny_tokenizer("smollm2"), max_length=64), Instructions.none()
    )


def batch_of(case: str) -> TokenBatch:
    """The batch of a case: in two of them some texts are empty, of every process, or of the second
    process alone.
    """
    batch = make_batch()
    if case == "silent":
        return silenced(batch, range(len(batch) // 2, len(batch)))
    return silenced(batch, range(1, len(batch), 2)) if case == "one_silent" else batch


def silenced(batch: TokenBatch, rows: range) -> TokenBatch:
    """Some pairs have empty texts."""

    def mute(text):
        return TokenizedText(text.ids[: text.start] + text.ids[text.stop :], text.start, text.start)

    sides = (
        [mute(text) if row in rows else text for row, text in enumerate(texts)]
        for texts in (batch.queries, batch.positives)
    )
    return TokenBatch(*sides, batch.negatives)


def make_decoder(head: str) -> CausalDecoder:
    decoder = CausalDecoder(tiny_model("llama", tied=head == "tied"))
    decoder.model.set_attn_implementation(ATTENTION)
    return decoder


def gradients(
    case: str, head: str, batch: TokenBatch, accelerator: Accelerator, sharded: bool = False
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Terms and gradients of the second of two equal steps, because a wrapper rearranges its
    messages after the first.
    """
    decoder = make_decoder(head)
    objective = CASES[case]
    set_attention(decoder, "bidirectional" if case == "mntp" else "causal")
    if head == "untied" and not objective.uses_head:
        decoder.head.requires_grad_(False)
    model = shard(decoder, torch.float32) if sharded else accelerator.prepare_model(decoder)
    for _ in range(2):
        model.zero_grad()
        terms = objective.step(model, batch, accelerator)
    return terms, whole_tensors(
        {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    )


def gain(case: str, accelerator: Accelerator) -> dict[str, float]:
    """The anchor gain of a global batch that is divided among the processes."""
    objective, pairs = GAINS[case]
    places = range(accelerator.process_index, pairs, accelerator.num_processes)
    return anchor_gain(
        objective, make_decoder("untied").eval(), make_batch().take(places), accelerator, places
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    # raise an error if a process waits for another one forever
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=100))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[patience])
    folder = Path(sys.argv[1])
    rank = accelerator.process_index
    world = accelerator.num_processes
    for case, head, sharded in itertools.product(CASES, HEADS, (False, True)):
        batch = batch_of(case)
        terms, found = gradients(
            case, head, batch.take(range(rank, len(batch), world)), accelerator, sharded
        )
        tensors = found | {f"terms.{name}": torch.tensor(value) for name, value in terms.items()}
        save_file(
            tensors, folder / f"{case}-{head}-{'fsdp' if sharded else 'ddp'}-{rank}.safetensors"
        )
    (folder / f"gains-{rank}.json").write_text(
        json.dumps({case: gain(case, accelerator) for case in GAINS})
    )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    os._exit(
        0
    )  # everything is on disk; torch's teardown of its threads may abort on a loaded machine
