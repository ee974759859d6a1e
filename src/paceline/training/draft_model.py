"""Training of a draft model: some of the target's own layers learn to say what all of them do.

Embedding and head are the target's and stay as they are; the layers and the final norm learn the target's distribution
over the draft vocabulary, on texts that it wrote. What is written is a checkpoint of the target's family with fewer
layers, which any engine reads, and the draft vocabulary beside it.

Sources: FastDraft: how to train your draft (arXiv:2411.11055); Hinton et al. 2015 (arXiv:1503.02531).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.errors import CapabilityError
from paceline.models.heads import write_folder
from paceline.models.loading import Checkpoint, read_config
from paceline.training.batches import Batch, TargetView
from paceline.training.heads import Trainer
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.training.train_config import TrainConfig

VOCABULARY: Final = "draft_vocab.json"
"""In the draft's folder: its vocabulary, for `draft_vocab_file`."""

COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                 "generation_config.json")  # fmt: skip

LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")


class DraftModelTrainer(Trainer):
    """A draft of the target's layers.

    Args:
        folder: of the target's checkpoint. layers: of it, ascending. rows: (v, hidden) of its head.
        depths: how many tokens ahead it is judged by.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    rate: ClassVar[float] = 3e-4

    def __init__(self, folder: Path, layers: Sequence[int], rows: Tensor, depths: int = 5) -> None:
        super().__init__(rows)
        self.depths, self.made_of = depths, tuple(layers)
        self.model, self.embed = _sliced(folder, layers)

    @classmethod
    def begun(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[DraftModelTrainer, TargetView]:
        count = llm.runner.info.num_layers
        layers = evenly(count) if config.layers is None else config.layers
        need(max(layers) < count, "layers", f"be below {count}, the model's layers", layers)
        view = TargetView(llm.runner, (), vocabulary, keep_bytes=config.feature_cache_bytes)
        depths = {} if config.depths is None else {"depths": config.depths}
        return cls(llm.folder, layers, view.rows, **depths), view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        states = self._states(batch).flatten(0, 1)[tokens - 1]
        return self.taught(batch).loss(states, self.rows, tokens) / max(1, len(tokens))

    def guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        states = self._states(batch).flatten(0, 1)
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            yield at, self.logits(states[at + depth + 1]).argmax(-1)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint of the target's family."""
        config, stored = read_config(llm.folder), Checkpoint(llm.folder)
        trained = {f"model.{name}": one.detach() for name, one in self.model.named_parameters()}
        tensors = {name: stored.tensor(name) for name in stored.entries if not LAYER.fullmatch(name)} | trained
        dtype = llm.runner.info.dtype
        provenance = {"layers": list(self.made_of), **facts}
        write_folder(
            folder,
            shortened(config, self.made_of) | {"paceline_draft": provenance},
            {name: one.to(dtype) for name, one in tensors.items()},
        )
        (folder / VOCABULARY).write_text(json.dumps(view.vocabulary.tolist()), encoding="utf-8")
        for name in COPIED:
            if (llm.folder / name).is_file():
                shutil.copyfile(llm.folder / name, folder / name)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        trimmed = {"draft_vocab_size": len(self.rows), "draft_vocab_file": str(folder / VOCABULARY)}
        return {"method": "draft_model", "model": str(folder), **trimmed}

    def _states(self, batch: Batch) -> Tensor:
        """(b, t, d) states behind the final norm."""
        lowest = torch.finfo(torch.float32).min
        hidden = torch.zeros(batch.visible().shape, device=batch.tokens.device)
        mask = hidden.masked_fill(~batch.visible(), lowest)[:, None]
        with torch.no_grad():
            embedded = self.embed[0](batch.tokens)
        made = self.model(
            inputs_embeds=embedded, attention_mask=mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        return cast(Tensor, made)


def evenly(count: int) -> tuple[int, ...]:
    """A fifth of so many layers, the first and the last among them."""
    wanted = max(2, round(count / 5)) if count > 1 else 1
    return tuple(round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted))


def shortened(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """A config.json of these layers alone."""
    count = config["num_hidden_layers"]
    lists = {
        key: [value[layer] for layer in layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count and "layer" in key
    }
    return {**config, **lists, "num_hidden_layers": len(layers)}


def _sliced(folder: Path, layers: Sequence[int]) -> tuple[nn.Module, tuple[nn.Module]]:
    """Layers and final norm in float32, and, where no module sees it, the embedding."""
    from transformers import AutoConfig, AutoModel

    config, stored = read_config(folder), Checkpoint(folder)
    given = AutoConfig.for_model(**shortened(config, layers))
    model = AutoModel.from_config(given, dtype=torch.float32)
    place = {layer: number for number, layer in enumerate(layers)}
    weights = {}
    for name in stored.entries:
        part = LAYER.fullmatch(name)
        if part is None:
            weights[name.removeprefix("model.")] = stored.tensor(name)
        elif int(part[1]) in place:
            weights[f"layers.{place[int(part[1])]}.{part[2]}"] = stored.tensor(name)
    absent = model.load_state_dict(weights, strict=False).missing_keys
    if absent:
        raise CapabilityError(
            f"{folder} holds no {absent[0]}, so that its layers cannot be made a draft model; train a head instead"
        )
    embed = model.get_input_embeddings().requires_grad_(False)
    model.set_input_embeddings(nn.Identity())
    return model, (embed,)
