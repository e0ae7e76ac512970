"""The table of architectures is that of the pinned transformers and has no third outcome; a sample
of it is computed again.
"""

import json
import re

import pytest
from notebook_checks import ROOT

from anchor_embedding.study.architectures import BOUNDS, try_type

TABLE = json.loads((ROOT / "nbs" / "results" / "architectures.json").read_text(encoding="utf-8"))
ROWS = {row["model_type"]: row for row in TABLE["rows"]}
USED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite", "gpt_oss",
)  # fmt: skip
SAMPLE = (
    *USED,
    "mixtral",
    "cohere",
    "deepseek_v3",
    "doge",
    "bloom",
    "gpt2",
    "mamba",
    "nemotron",
    "opt",
    "bert",
)


def pinned(name: str) -> str:
    return re.search(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def test_the_table_is_of_the_pinned_transformers_and_of_all_its_models():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert TABLE["about"]["transformers"] == pinned("transformers"), (
        "regenerate the table: see nbs/which_models.ipynb"
    )
    assert TABLE["about"]["bounds"] == BOUNDS
    assert ROWS.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def test_every_model_is_right_or_refused_with_a_reason():
    verdicts = {name: row["verdict"] for name, row in ROWS.items()}
    assert set(verdicts.values()) == {"right", "refused", "not built"}
    assert sum(verdict == "not built" for verdict in verdicts.values()) <= 10
    assert all(row["reason"] for row in ROWS.values() if row["verdict"] != "right")
    assert all(verdicts[name] == "right" for name in USED)
    for row in ROWS.values():
        if row["verdict"] == "right":
            assert all(row[name] < bound for name, bound in BOUNDS.items() if name in row), row


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_the_table_made_again(model_type):
    row = try_type(model_type)
    assert row["verdict"] == ROWS[model_type]["verdict"], row
    assert row.get("lora") == ROWS[model_type].get("lora")
