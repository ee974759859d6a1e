"""Uni-Encoder: a bidirectional encoder that scores all candidates of a context in one pass.

Context and candidates are one sequence. Every candidate begins at the position behind the context, with a marker (the
tokenizer's start token). Context and candidates see each other in full, a candidate sees itself, and no
candidate sees another: seen as a matrix, an arrow. The score is a linear layer on the mean state of a candidate's
tokens. The context sees all candidates, so that a score depends on which others there are; the one-way and the diagonal
mask, in which it sees less, are here for comparison. Source: Uni-Encoder: A Fast and Accurate Response Selection
Paradigm for Generation-Based Dialogue Systems (arXiv:2106.01263).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from paceline.checkpoints import Checkpoint
from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.utils import choice

MASKS: Final = ("arrow", "one_way", "diagonal")

HEAD: Final = frozenset({"classifier.weight", "classifier.bias"})


def candidate_mask(sizes: Sequence[int], kind: str = "arrow") -> torch.Tensor:
    """(t, t) bool: whom each token sees.

    Args:
        sizes: tokens of the context, then of each candidate.
        kind: "arrow"; "one_way", whose context does not see the candidates; "diagonal", whose candidates do not see the
            context either.
    """
    part = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(list(sizes)))
    same, context = part[:, None] == part[None], part == 0
    if kind == "arrow":
        return same | context[:, None] | context[None]
    return same | context[None] if kind == "one_way" else same


def _check(config: Any, weights: Checkpoint, name: str) -> None:
    """Reject what is no such encoder.

    Raises:
        UnsupportedModelError: another model, several outputs, or an ordinary cross-encoder.
    """
    if config.model_type != "bert" or config.num_labels != 1:
        raise UnsupportedModelError(
            f"scorer {name!r} is {config.model_type} with {config.num_labels} outputs; one_pass needs bert with one"
        )
    pooler = sorted(part for part in weights.entries if ".pooler." in f".{part}")
    if pooler:
        raise UnsupportedModelError(
            f"scorer {name!r} must have no pooler with one_pass, got {pooler[0]}, the mark of an ordinary "
            "cross-encoder, whose head reads its output; leave one_pass out"
        )


class UniEncoder(nn.Module):
    """See the module.

    Args:
        encoder: of BERT's family, as transformers calls it; on the CPU.
        head: hidden size to 1. tokenizer: of transformers.
        mask: one of `MASKS`.
    """

    def __init__(self, encoder: Any, head: nn.Linear, tokenizer: Any, mask: str = "arrow") -> None:
        super().__init__()
        choice("mask", mask, MASKS)
        self.encoder, self.head, self.tokenizer, self.mask = encoder, head, tokenizer, mask

    @classmethod
    def load(cls, folder: Path, name: str) -> UniEncoder:
        """From a checkpoint with the names of BertForSequenceClassification and one output, whose linear layer is the
        head, without a pooler: behind one, that layer reads another state than the mean of a text's.

        Raises:
            CheckpointError, UnsupportedModelError: none of that.
        """
        from transformers import AutoConfig, AutoTokenizer, BertModel

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        weights = Checkpoint(folder)
        try:
            config = AutoConfig.from_pretrained(str(folder), **options)
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
            _check(config, weights, name)
            encoder, report = BertModel.from_pretrained(
                str(folder), add_pooling_layer=False, dtype=torch.float32, use_safetensors=True,
                output_loading_info=True, local_files_only=True,
            )  # fmt: skip
        except PacelineError:
            raise
        except Exception as error:  # transformers raises whatever its configuration classes raise
            raise UnsupportedModelError(f"scorer {name!r} cannot be loaded: {error}".splitlines()[0]) from error
        lacking = sorted({*report["missing_keys"], *(HEAD - weights.entries.keys())})
        if lacking:
            raise CheckpointError(f"scorer {name!r} lacks weights: {', '.join(lacking[:3])}")
        head = nn.Linear(config.hidden_size, 1)
        head.load_state_dict({part.rpartition(".")[2]: weights.tensor(part).float() for part in HEAD})
        return cls(encoder, head, tokenizer).eval()

    def forward(self, context: Sequence[int], candidates: Sequence[Sequence[int]]) -> torch.Tensor:
        """(n,) scores of candidates, each a token or more with its marker, behind a context; both as token ids."""
        sizes = [len(context), *map(len, candidates)]
        tokens = torch.tensor([[*context, *(token for candidate in candidates for token in candidate)]])
        places = [*range(len(context)), *(len(context) + i for candidate in candidates for i in range(len(candidate)))]
        seen = candidate_mask(sizes, self.mask)
        states = self.encoder(
            input_ids=tokens,
            attention_mask=torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None],
            position_ids=torch.tensor([places]),
            token_type_ids=torch.tensor([[0] * sizes[0] + [1] * sum(sizes[1:])]),
        ).last_hidden_state[0]
        means = torch.stack([part.mean(0) for part in states.split(sizes)[1:]])
        scores: torch.Tensor = self.head(means)[:, 0]
        return scores

    @torch.inference_mode()
    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """One for each text behind a prompt, whose beginning is cut off where it is longer than the encoder reads."""
        most = self.encoder.config.max_position_embeddings - 1
        candidates = [self.tokenizer(text)["input_ids"][:most] for text in texts]
        context = self.tokenizer(prompt)["input_ids"][-(most + 1 - max(map(len, candidates))) :]
        scores: list[float] = self(context, candidates).tolist()
        return scores
