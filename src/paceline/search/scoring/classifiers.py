"""Judges that were trained: checkpoints of transformers for sequence classification, from safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints import read_json
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.utils import need

BATCH: Final = 32
"""Pairs that a checkpoint judges at once."""


class ClassifierScorer:
    """A checkpoint of transformers for sequence classification.

    Args:
        label: whose log-probability is the score; None takes the one output as it is.
    Raises:
        ConfigError: no such label, or several outputs and no label.
        CheckpointError, UnsupportedModelError: nothing that transformers can load from safetensors.
    """

    def __init__(self, folder: Path, name: str, label: int | None = None) -> None:
        self.model, self.tokenizer = load_classifier(folder, name)
        outputs = self.model.config.num_labels
        rule = f"be one of the outputs of {name}, 0..{outputs - 1}"
        need(outputs == 1 if label is None else label < outputs, "scorer label", rule, label)
        self.label = label
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(texts), BATCH):
            part = list(texts[start : start + BATCH])
            padded = self.tokenizer(
                [prompt] * len(part), part, padding=True, truncation="only_first", return_tensors="pt"
            )
            logits = self.model(**padded).logits.float()
            scores += (logits[:, 0] if self.label is None else logits.log_softmax(-1)[:, self.label]).tolist()
        return scores


def is_classifier(folder: Path) -> bool:
    """Whether the checkpoint in a folder is one for sequence classification."""
    names = [] if folder.is_file() else read_json(folder / "config.json").get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def load_classifier(folder: Path, name: str) -> tuple[Any, Any]:
    """A checkpoint for sequence classification and its tokenizer, on the CPU in float32.

    Raises:
        CheckpointError, UnsupportedModelError: nothing that transformers can load from safetensors.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            str(folder), dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # transformers raises whatever its configuration classes raise
        raise UnsupportedModelError(f"scorer {name!r} cannot be loaded: {error}".splitlines()[0]) from error
    if report["missing_keys"]:
        raise CheckpointError(f"scorer {name!r} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer
