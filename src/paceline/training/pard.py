"""PARD: a draft model learns to predict several tokens in one pass, from mask tokens behind a text.

A mask token of depth g behind token a, its anchor, predicts token a + g + 1; all anchors of a text share one pass,
whose rows and what they see are those of `masked_rows`:

    input: the token, or the mask token; position: anchor + g                              (r,)
    loss: cross-entropy of token a + g + 1, the mean over all rows that an answer's token follows

The whole model learns, embedding and head included, and still predicts the next token.

The mask token is the one that the draft model's config.json names, else the first id that is no token, for which the
embedding grows by a row where it has none to spare.

Source: PARD: accelerating LLM inference with low-cost parallel draft model adaptation (arXiv:2504.18583).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoints import (
    MASK_TOKEN,
    QUANTIZATION_KEYS,
    Tokenizer,
    mask_token,
    open_checkpoint,
    read_config,
    resolve,
    same_tokenizer,
)
from paceline.config import documented, option
from paceline.errors import CapabilityError, ConfigError
from paceline.training.batches import PAD, Batch, TargetView
from paceline.training.draft_model import write_checkpoint
from paceline.training.heads import Trainer
from paceline.training.masked_rows import MaskedConfig, MaskedRows, anchors_of, retained
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

DEPTHS: Final = 8
"""Tokens of a pass where nobody says how many, the paper's."""


@documented
@dataclass(frozen=True, kw_only=True)
class PardConfig(MaskedConfig):
    """Says which draft model becomes parallel, and how many mask tokens of a text are learned in a step."""

    draft_model: str | None = option(None, "Folder or hub id of the draft model that becomes parallel.")


def tokens_in(batch: Batch, i: int) -> Tensor:
    """(n,) places of the tokens of packed row i, without what fills it up."""
    return (batch.documents[i] != PAD).nonzero().squeeze(1)


class PardTrainer(Trainer):
    """Trains a draft model to predict `depths` tokens in one pass.

    Args:
        model: a causal model of transformers, in float32. mask: its mask token.
        rows: as above. config: with the shares that are retained, and `depths`.
        stored: config.json of the model as it will be written.
    """

    name: ClassVar[str] = "pard"
    config_class: ClassVar[type[TrainConfig]] = PardConfig
    rate: ClassVar[float] = 3e-5

    def __init__(
        self, model: nn.Module, mask: int, rows: Tensor, config: PardConfig, stored: Mapping[str, Any]
    ) -> None:
        super().__init__(rows)
        self.model, self.mask, self.stored = model, mask, stored
        self.settings, self.depths = config, config.depths or DEPTHS

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, PardConfig)
        named = isinstance(config.draft_model, str) and config.draft_model != ""
        need(named, "draft_model", "be the folder or hub id of a draft model for pard", config.draft_model)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[PardTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary.

        Raises:
            ConfigError: a draft model with another tokenizer.
            CapabilityError: one that is no causal model of transformers.
            CheckpointError: nothing to load there.
        """
        assert isinstance(config, PardConfig)
        name = str(config.draft_model)
        folder = resolve(name)
        if why := same_tokenizer(llm.tokenizer, Tokenizer.load(folder)):
            raise ConfigError(f"draft_model must have the model's tokenizer, got {name!r}: {why}")
        stored = {key: value for key, value in read_config(folder).items() if key not in QUANTIZATION_KEYS}
        model = causal_model(folder, read_config(folder))
        mask = mask_token(stored, name)
        if mask is None:
            mask = 1 + max(llm.tokenizer.tokens())
            stored = with_mask(model, mask, stored)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        return cls(model, mask, view.rows, config, stored), view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        kept = retained(batch, self.depths, self.settings, generator)
        learned = anchors_of(batch, 0).cpu()
        total, count = self.rows.new_zeros(()), 0
        for i in range(len(batch.tokens)):
            rows = MaskedRows.of(tokens_in(batch, i), [one[i] for one in kept])
            picked = ((rows.depths > 0) | learned[i][rows.anchors]).nonzero().squeeze(1)
            labels = batch.tokens[i][(rows.anchors + rows.depths + 1)[picked].to(batch.tokens.device)]
            total = total + F.cross_entropy(self.logits_of(batch, i, rows, picked).float(), labels, reduction="sum")
            count += len(picked)
        return total / max(1, count)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        anchors = [anchors_of(batch, depth).cpu() for depth in range(self.depths)]
        found: list[list[Tensor]] = [[] for _ in anchors]
        for i in range(len(batch.tokens)):
            rows = MaskedRows.of(tokens_in(batch, i), [one[i] for one in anchors[1:]])
            picked = ((rows.depths > 0) | anchors[0][i][rows.anchors]).nonzero().squeeze(1)
            best = self._likeliest(self.logits_of(batch, i, rows, picked))
            for depth, part in enumerate(best.split([int(one[i].sum()) for one in anchors])):
                found[depth].append(part)
        for depth, parts in enumerate(found):
            yield batch.learned(depth + 2)[0], torch.cat(parts)

    def logits_of(self, batch: Batch, i: int, rows: MaskedRows, picked: Tensor) -> Tensor:
        """(m, draft vocabulary) logits of some rows, (m,), of a pass over packed row i."""
        device = batch.tokens.device
        depths, anchors = rows.depths.to(device), rows.anchors.to(device)
        ids = torch.where(depths == 0, batch.tokens[i][anchors], self.mask)
        visible = rows.visible(batch.documents[i].cpu()).to(device)
        mask = torch.zeros(visible.shape, device=device).masked_fill(~visible, torch.finfo(torch.float32).min)
        result = self.model(
            input_ids=ids[None], attention_mask=mask[None, None], use_cache=False, logits_to_keep=picked.to(device),
            position_ids=(batch.positions[i][anchors] + depths)[None],
        )  # fmt: skip
        return cast(Tensor, result.logits[0])

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint as PARD's are published, in the target's dtype, with its tokenizer."""
        config = {**self.stored, MASK_TOKEN: self.mask, "spd_type": "pard", "paceline_draft": dict(facts)}
        write_checkpoint(folder, llm, config, {name: one.detach() for name, one in self.model.named_parameters()})

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "pard", "model": str(folder)}

    def _likeliest(self, logits: Tensor) -> Tensor:
        """(m,) the likeliest tokens; the mask is none."""
        return logits.index_fill(-1, torch.tensor([self.mask], device=logits.device), float("-inf")).argmax(-1)


def causal_model(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """The causal model of transformers in a folder, in float32.

    Raises:
        CapabilityError: transformers has no such model, or other names for its weights than its files have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = open_checkpoint(folder, config)
    floats = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**floats), dtype=torch.float32)
    except (KeyError, ValueError) as error:
        raise CapabilityError(f"{folder} holds no causal model of transformers that can be trained: {error}") from error
    absent = model.load_state_dict({name: stored.tensor(name) for name in stored.entries}, strict=False).missing_keys
    learned = {name for name, _ in model.named_parameters()}  # of tied ones the first
    if lacking := [name for name in absent if name in learned]:
        raise CapabilityError(f"{folder} holds no {lacking[0]}, as transformers names it, so that it cannot be trained")
    return cast(nn.Module, model)


@torch.no_grad()
def with_mask(model: nn.Module, mask: int, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Give a causal model the mean of all embeddings for its mask token, in a row of its own; returns its config.json
    with as many rows.
    """
    causal = cast(Any, model)
    mean = causal.get_input_embeddings().weight[:mask].mean(0)
    config = dict(stored)
    if mask >= causal.get_input_embeddings().weight.shape[0]:
        causal.resize_token_embeddings(mask + 1, mean_resizing=False)
        config["vocab_size"] = mask + 1
    causal.get_input_embeddings().weight[mask] = mean
    return config
