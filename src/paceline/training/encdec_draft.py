"""Training of a draft for an encoder-decoder model: some of its own decoder layers learn to say what all of them say.

They attend to the keys and values that the model's layers, of which they were made, have of a source. Embedding,
positions, final norm and head stay the model's. What is learned is its distribution over the draft vocabulary, on
what it wrote from sources: lines of texts, or speech.

Source: Distil-Whisper: robust knowledge distillation via large-scale pseudo labelling (arXiv:2311.00430), whose student
begins as the first and the last of the teacher's decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import REQUIRED, documented, option
from paceline.engine import ReadPrompt
from paceline.models import ModelSpec, around_layers, shortened_spec, source_draft_target, trained_shapes
from paceline.models.heads import SourceDraft, write_source_draft
from paceline.models.layers import Rotary, placement_of, relative_biases
from paceline.training.answers import SourcePrompt
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.draft_model import check_layers
from paceline.training.next_token import NextTokenTrainer
from paceline.training.source_layers import SourceLayer, Surroundings, check_trainable, modules_of
from paceline.training.source_view import SourceBatch, SourceView
from paceline.training.sources import check_sources, source_prompts
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

Tensors = dict[str, Tensor]


@documented
@dataclass(frozen=True, kw_only=True)
class EncDecDraftConfig(TrainConfig):
    """Says which layers of an encoder-decoder model draft, and what they learn from."""

    data: Sequence[Path] = option(
        REQUIRED, "Files of texts, a source each line or prompt; for Whisper, folders of speech; repeatable.",
        check=lambda name, value: need(bool(value), name, "name at least one file or folder", value),
    )  # fmt: skip
    layers: tuple[int, ...] | None = option(
        None, "Of the model's decoder, for encdec_draft: 0 or 0,5; the first and the last by default.",
        check=check_layers,
    )  # fmt: skip
    language: str = option("en", "Of speech: its code or English name.")

    def __post_init__(self) -> None:
        super().__post_init__()
        need(not self.texts, "texts", f"be left out for {self.method}, which learns what the model writes", self.texts)
        rule = f"be 0 for {self.method}, whose sources are kept in memory or read again"
        need(self.feature_disk_bytes == 0, "feature_disk_bytes", rule, self.feature_disk_bytes)


class EncDecDraftTrainer(NextTokenTrainer):
    """Trains decoder layers on a target's sources.

    Args:
        spec: of the draft. weights: `models.around_layers` with the layers, in float32; taken out.
        made_of: layers of the target. view: of it. depths: how many tokens ahead it is judged by.
    """

    name: ClassVar[str] = "encdec_draft"
    config_class: ClassVar[type[TrainConfig]] = EncDecDraftConfig
    rate: ClassVar[float] = 3e-4
    reads_sources: ClassVar[bool] = True

    def __init__(
        self, spec: ModelSpec, weights: Tensors, made_of: Sequence[int], view: SourceView, depths: int | None = None
    ) -> None:
        super().__init__(view.rows, depths)
        self.spec, self.made_of, self.biased = spec, tuple(made_of), view.biased
        device = view.rows.device
        self._biases = relative_biases(spec, weights)
        self._placement = placement_of(spec, weights, torch.float32, device)
        self._rotary = Rotary(spec.ropes, device, torch.float32)
        own = {name: weights.pop(name) for name in trained_shapes(spec)}
        self.layers = nn.ModuleList([SourceLayer(spec, _of_layer(own, index)) for index in range(spec.num_layers)])
        self._final = tuple(module.requires_grad_(False) for module in modules_of(_final_norm(weights), spec).values())

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, EncDecDraftConfig)
        count = target.num_layers
        need(max(config.layers or (0,)) < count, "layers", f"be below {count}, the decoder's layers", config.layers)

    @classmethod
    def check_data(cls, data: Sequence[Path]) -> None:
        check_sources(data)

    @classmethod
    def prompts(cls, llm: LLM, config: TrainConfig) -> dict[str, SourcePrompt]:
        """The sources; CapabilityError for a model without an encoder."""
        assert isinstance(config, EncDecDraftConfig)
        source_draft_target(llm.runner, cls.name)
        return source_prompts(llm, config.data, most=config.most_prompts, language=config.language)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[EncDecDraftTrainer, TargetView]:
        assert isinstance(config, EncDecDraftConfig)
        target = source_draft_target(llm.runner, cls.name)
        check_trainable(target.spec, target.info.name)
        layers = config.layers or tuple(sorted({0, target.info.num_layers - 1}))
        view = SourceView(
            target, vocabulary, sources=cls.prompts(llm, config), layers=layers, keep_bytes=config.feature_cache_bytes
        )
        weights = around_layers(target, llm.folder, layers, dtype=torch.float32, with_layers=True)
        return cls(shortened_spec(target.spec, layers), weights, layers, view, config.depths), view

    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """Read the sources, so that the time for training is for training."""
        assert isinstance(view, SourceView)
        view.read_ahead(documents)

    def states(self, batch: Batch) -> Tensor:
        assert isinstance(batch, SourceBatch)
        b, t, d = batch.embedded.shape
        positions = batch.positions.flatten().tolist()
        x = self._placement.apply(batch.embedded.flatten(0, 1).clone(), positions).view(b, t, d)
        masks, rotations = self._masks(batch), self._rotary.at(positions, ())
        sizes = [[int((row == number).sum()) for number in range(int(row.max()) + 1)] for row in batch.documents]
        for index, layer in enumerate(self.layers):
            rope = self.spec.layers[index].rope
            memories = [[memory[index] for memory in row] for row in batch.memories]
            x = layer(x, Surroundings(masks[index], None if rope is None else rotations[rope], sizes, memories))
        for norm in self._final:
            x = norm(x)
        return F.pad(x, (0, 1), value=1.0) if self.biased else x

    def _masks(self, batch: Batch) -> list[Tensor]:
        """By layer, what is added to the scores of self attention."""
        hidden = batch.visible().logical_not()[:, None]
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))
        if not self._biases:
            return [mask] * self.spec.num_layers
        distances = batch.positions[:, None, :] - batch.positions[:, :, None]
        return [bias.of(distances).transpose(0, 1).float() + mask for bias in self._biases]

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Write the layers, and the draft vocabulary."""
        tensors = {name: parameter.to(llm.runner.info.dtype) for name, parameter in self.named_parameters()}
        if len(view.vocabulary) < llm.runner.info.vocab_size:
            tensors["draft_to_target"] = view.vocabulary
        draft = SourceDraft(layers=self.made_of, target=facts["target"], provenance=facts)
        write_source_draft(folder, draft, tensors)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": self.name, "model": str(folder)}

    def timed_prompts(self, view: TargetView, documents: Sequence[Document]) -> list[ReadPrompt]:
        assert isinstance(view, SourceView)
        return [view.sources[document.text].read() for document in documents]


def _of_layer(weights: Mapping[str, Tensor], index: int) -> Tensors:
    """Those of a layer, without its number."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _final_norm(weights: Mapping[str, Tensor]) -> Tensors:
    return {name: weight for name, weight in weights.items() if name.startswith("final_norm.")}
