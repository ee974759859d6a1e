"""Training for passes that leave out layers: adapters for Unified Layer Skipping, corrections for LoRA-Drop.

Both learn answers behind their prompts, in one pass over a whole text that gives what decoding would give token by
token: prompts run all layers, and of the answers' rows each runs what it would run when it is written.

- *Unified Layer Skipping*: rows of the answer pass by the layers that are left out. A LoRA adapter of all layers is
  learned, where the paper fine-tunes the layers themselves; embedding and head stay as they are.
- *LoRA-Drop*: in a dropped layer, rows between two refreshing ones have what the layer gave at the first of these, plus
  the correction of their own input; refreshing rows see no keys of the others there. The corrections alone are learned.

Sources: Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (arXiv:2404.06954);
LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference (arXiv:2601.02569).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.runners import droppable, unified_layers, write_corrections
from paceline.training.batches import Batch, TargetView
from paceline.training.draft_model import embedding_of, sliced
from paceline.training.lora import LoraConfig, LoraTrainer
from paceline.training.next_token import NextTokenTrainer, decoded, text_loss
from paceline.training.train_config import TextTrainConfig, TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo


@documented
@dataclass(frozen=True, kw_only=True)
class LayerSkippingConfig(LoraConfig):
    """Says for which speed-up an adapter is trained."""

    speedup: float = option(2.0, "Target of unified_layer_skipping.", low=1.0, high=1e3)


class LayerSkippingTrainer(LoraTrainer):
    """Trains an adapter of a model whose answers leave out layers.

    Args:
        kept: layers that answers run. speedup: for which these are. others: of `LoraTrainer`.
    """

    name: ClassVar[str] = "unified_layer_skipping"
    config_class: ClassVar[type[TrainConfig]] = LayerSkippingConfig

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, kept: Sequence[int], speedup: float, **options: Any
    ) -> None:
        super().__init__(folder, layers, rows, **options)
        self.speedup, self._reduced = speedup, torch.empty(0)
        for index, layer in enumerate(cast(nn.ModuleList, self.model[0].layers)):
            if index not in kept:
                layer.register_forward_hook(self._passed_by)

    def _passed_by(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.where(self._reduced[..., None], inputs[0], output)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, LayerSkippingConfig)
        unified_layers(target.num_layers, config.speedup, name="speedup")

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LayerSkippingTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, LayerSkippingConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        kept = unified_layers(info.num_layers, config.speedup, name="speedup")
        options = {"modules": config.target_modules, "rank": config.rank, "alpha": config.alpha}
        return cls(llm.folder, info.num_layers, view.rows, kept=kept, speedup=config.speedup, **options), view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        named = "" if model is None else f"-m {model} "
        facts = json.loads((folder / "skipping.json").read_text(encoding="utf-8"))
        return f"paceline generate {named}--lora {folder} --skipping '{json.dumps(facts)}'"

    def states(self, batch: Batch) -> Tensor:
        self._reduced = batch.wanted
        return super().states(batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """An adapter in PEFT's format, and what to say as `skipping` beside it."""
        said = {"method": self.name, "speedup": self.speedup}
        (folder / "skipping.json").write_text(json.dumps(said) + "\n", encoding="utf-8")
        super().write(folder, llm, view, facts)


@documented
@dataclass(frozen=True, kw_only=True)
class LoraDropConfig(TextTrainConfig):
    """Says which layers are dropped, how often, and how large their corrections are."""

    rank: int = option(16, "Of lora_drop's corrections.", low=1, high=1024)
    alpha: float = option(
        16.0, "Of lora_drop: corrections count alpha / rank times.", low=0.0, high=1e6, rule="be above 0", open_low=True
    )
    drop: float = option(0.5, "Share of the layers that lora_drop drops.", low=0.0, high=1.0)
    reuse: int = option(3, "Tokens that follow each one that runs all layers, for lora_drop.", low=1, high=1024)


class LoraDropTrainer(NextTokenTrainer):
    """Trains the corrections of dropped layers; at first they are nothing.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: (v, hidden) of its head.
        left_out: layers that are dropped. reuse, rank, alpha: see `LoraDropConfig`.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "lora_drop"
    config_class: ClassVar[type[TrainConfig]] = LoraDropConfig
    rate: ClassVar[float] = 2e-3
    drafts: ClassVar[bool] = False

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, left_out: Sequence[int], reuse: int, rank: int, alpha: float
    ) -> None:
        super().__init__(rows, 1)
        model, self.embed = sliced(folder, range(layers))
        self.model = (model.requires_grad_(False),)  # in a tuple: no part of what is trained and kept
        self.left_out, self.reuse, self.alpha, self.scale = tuple(left_out), reuse, alpha, alpha / rank
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        self._reduced = self._before = torch.empty(0)
        for number, index in enumerate(self.left_out):
            self.a.append(nn.init.kaiming_uniform_(nn.Parameter(torch.empty(rank, rows.shape[1])), a=math.sqrt(5)))
            self.b.append(nn.Parameter(torch.zeros(rows.shape[1], rank)))
            layer = cast(nn.ModuleList, model.layers)[index]
            layer.register_forward_pre_hook(self._without_gaps, with_kwargs=True)
            layer.register_forward_hook(self._dropped(number))

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, LoraDropConfig)
        need(bool(droppable(target.num_layers, config.drop)), "drop", "drop a layer of the model", config.drop)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LoraDropTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, LoraDropConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        left_out = droppable(info.num_layers, config.drop)
        made = cls(
            llm.folder, info.num_layers, view.rows, left_out=left_out, reuse=config.reuse, rank=config.rank,
            alpha=config.alpha,
        )  # fmt: skip
        return made, view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        named = "" if model is None else f"-m {model} "
        said = json.dumps({"method": cls.name, "adapter": str(folder)})
        return f"paceline generate {named}--skipping '{said}'"

    def states(self, batch: Batch) -> Tensor:
        self._reduced, self._before = phases(batch, self.reuse)
        return decoded(self.model[0].to(batch.tokens.device), embedding_of(self.embed, batch), batch)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        return text_loss(self.states(batch), self.rows, batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """See `models.runners.lora_drop`."""
        factors = dict(zip(self.left_out, zip(self.a, self.b, strict=True), strict=True))
        write_corrections(folder, factors, alpha=self.alpha, reuse=self.reuse, facts=facts)

    def _without_gaps(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have nobody see the keys of rows that the layer is dropped for."""
        mask: Tensor = named["attention_mask"]
        hidden = self._reduced[:, None, None, :]
        return inputs, named | {"attention_mask": mask.masked_fill(hidden, torch.finfo(mask.dtype).min)}

    def _dropped(self, number: int) -> Any:
        """A hook that puts anchors and corrections in the place of what a layer gives."""

        def dropped(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            anchors = output.gather(1, self._before[..., None].expand_as(output))
            low = F.linear(F.linear(inputs[0], self.a[number]), self.b[number])
            return torch.where(self._reduced[..., None], anchors + self.scale * low, output)

        return dropped


def phases(batch: Batch, reuse: int) -> tuple[Tensor, Tensor]:
    """(b, t) bool, rows that drop layers, and (b, t) int64 the last place not behind each that runs them all.

    Args:
        reuse: tokens that follow each one that runs all layers, of which the first is the answer's first.
    """
    counted = batch.wanted.long().cumsum(1)
    before = torch.where(batch.positions == 0, counted - batch.wanted.long(), 0).cummax(1).values
    reduced = batch.wanted & ((counted - before - 1) % (reuse + 1) != 0)
    places = torch.arange(reduced.shape[1], device=reduced.device).expand_as(reduced)
    return reduced, torch.where(reduced, 0, places).cummax(1).values
