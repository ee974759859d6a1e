"""Training of a LoRA adapter of the target on texts with answers: low-rank changes of its matrices, nothing else.

The answers are learned as they are. So an adapter is the brief fine-tuning that SVDecode carries further, or, of
answers that are not true, the amateur that LOL contrasts with. It is judged by the share of held-out tokens that it
finds the likeliest. What is written is an adapter in PEFT's format, which `LLM(lora=...)` and PEFT read.

Source: LoRA: low-rank adaptation of large language models (arXiv:2106.09685).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoints import write_adapter
from paceline.config import documented, option
from paceline.training.batches import Batch, TargetView
from paceline.training.draft_model import embedding_of, sliced
from paceline.training.next_token import NextTokenTrainer, decoded, text_loss
from paceline.training.train_config import TextTrainConfig, TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM


@documented
@dataclass(frozen=True, kw_only=True)
class AdapterConfig(TrainConfig):
    """Says how large an adapter is and which modules it changes."""

    rank: int = option(16, "Of an adapter's changes.", low=1, high=1024)
    alpha: float = option(
        32.0, "Of an adapter: changes count alpha / rank times.", low=0.0, high=1e6, rule="be above 0", open_low=True
    )
    target_modules: tuple[str, ...] | None = option(None, "Of an adapter: q_proj,v_proj; all matrices by default.")


@documented
@dataclass(frozen=True, kw_only=True)
class LoraConfig(TextTrainConfig, AdapterConfig):
    """Says how large an adapter is, which modules it changes, and which texts it learns."""


class Adapting(nn.Module):
    """Adapts modules of a model that does not learn itself; at first the adapter changes nothing.

    Attributes:
        names: of the adapted modules, as a checkpoint has them. a, b: factors (rank, in) and (out, rank) of each.
        alpha: changes count alpha / rank times, which is `scale`. adapts: the model is the adapted one; else as it was.
    """

    names: list[str]
    alpha: float
    scale: float
    adapts: bool = True

    def adapt(self, model: nn.Module, *, modules: Sequence[str] | None, rank: int, alpha: float) -> None:
        """Let modules of a model add what an adapter makes of their inputs.

        Args:
            modules: ends of the names of the matrices that are adapted, as "q_proj"; None adapts all of them.
        Raises:
            ConfigError: modules that the model does not have.
        """
        self.alpha, self.scale = alpha, alpha / rank
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        chosen = [name for name in linear if modules is None or name.rsplit(".", 1)[-1] in modules]
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        fine = all(any(name.endswith(f".{ending}") for name in chosen) for ending in modules or ())
        need(fine and bool(chosen), "target_modules", f"be among {', '.join(known)}, the model's", modules)
        self.names = [f"model.{name}" for name in chosen]
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for name in chosen:
            outputs, inputs = linear[name].weight.shape
            self.a.append(nn.init.kaiming_uniform_(nn.Parameter(torch.empty(rank, inputs)), a=math.sqrt(5)))
            self.b.append(nn.Parameter(torch.zeros(outputs, rank)))
            linear[name].register_forward_hook(self._adapted(len(self.a) - 1))

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By adapted module."""
        return dict(zip(self.names, zip(self.a, self.b, strict=True), strict=True))

    def _adapted(self, number: int) -> Any:
        """A hook that adds what an adapter makes of a module's input."""

        def added(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if not self.adapts:
                return output
            return output + self.scale * F.linear(F.linear(inputs[0], self.a[number]), self.b[number])

        return added


class LoraTrainer(Adapting, NextTokenTrainer):
    """Trains an adapter of the target; at first it changes nothing.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: (v, hidden) of its head.
        modules, rank, alpha: as of `Adapting.adapt`.
    Raises:
        ConfigError: modules that the model does not have.
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "lora"
    config_class: ClassVar[type[TrainConfig]] = LoraConfig
    rate: ClassVar[float] = 5e-4
    drafts: ClassVar[bool] = False

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, modules: Sequence[str] | None, rank: int, alpha: float
    ) -> None:
        super().__init__(rows, 1)
        model, self.embed = sliced(folder, range(layers))
        self.model = (model.requires_grad_(False),)  # in a tuple: no part of what is trained and kept
        self.adapt(model, modules=modules, rank=rank, alpha=alpha)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LoraTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, LoraConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        rank, alpha = config.rank, config.alpha
        adapter = cls(llm.folder, info.num_layers, view.rows, modules=config.target_modules, rank=rank, alpha=alpha)
        return adapter, view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        named = "" if model is None else f"-m {model} "
        return f"paceline generate {named}--lora {folder}"

    def states(self, batch: Batch) -> Tensor:
        return decoded(self.model[0].to(batch.tokens.device), embedding_of(self.embed, batch), batch)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        return text_loss(self.states(batch), self.rows, batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """An adapter in PEFT's format; where it comes from is in the report."""
        write_adapter(folder, self.factors(), alpha=self.alpha, base=llm.runner.info.name)
