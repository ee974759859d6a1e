"""Training of a module for multi-token prediction: one layer, used again for each token (training.mtp_steps). A model
that has none gets a layer of Llama's form; the module that a model's files hold is trained further
(training.shipped_mtp).

Source: FastMTP: accelerating LLM inference with enhanced multi-token prediction (arXiv:2509.18362).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import prediction_module
from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch, Document, TargetView, packed
from paceline.training.heads import HeadTrainer, layer_of
from paceline.training.layer import Keys, RMSNorm, TrainableDecoderLayer
from paceline.training.mtp_steps import DEPTHS, StepsTrainer
from paceline.training.shipped_mtp import ShippedMtpTrainer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.training.train_config import TrainConfig


class MtpLayer(TrainableDecoderLayer):
    """A decoder layer that norms what its attention reads."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, layer.get("rms_norm_eps") or 1e-6)


class MtpTrainer(StepsTrainer):
    """Trains a module of one layer, or the one that the target's files hold."""

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = DEPTHS) -> None:
        super().__init__(config, rows, depths)
        d, eps = config.hidden_size, config.layer.get("rms_norm_eps") or 1e-6
        self.embed_norm, self.state_norm, self.norm = (RMSNorm(d, eps) for _ in range(3))
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = nn.ModuleList([MtpLayer(config.layer, d)])
        with torch.no_grad():  # it begins with the target's state, and reads the token little by little
            self.fc.weight.mul_(0.1)[:, d:] += torch.eye(d)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[HeadTrainer, TargetView]:
        """See `Trainer.init`.

        Raises:
            CapabilityError, CheckpointError, UnsupportedModelError: the target's own module cannot be trained further.
        """
        module = prediction_module(llm.folder)
        if module is None:
            return super().init(llm, config, vocabulary)
        view = TargetView(llm.runner, (), vocabulary, keep_bytes=config.feature_cache_bytes)
        own = cls.config_of(llm.runner.info, layer_of(llm.runner), len(vocabulary), DEPTHS)
        return ShippedMtpTrainer(own, view.rows, config.depths or DEPTHS, module), view

    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """Let states begin as long as the target's, for which its head is made."""
        batch = view.batch(packed(documents, length)[:1], length)
        states = batch.final[batch.documents >= 0]
        with torch.no_grad():
            self.norm.weight.fill_(float(states.float().square().mean().sqrt()))

    def behind(self, x: Tensor, batch: Batch, kept: list[Any]) -> Tensor:
        layer, before = cast(MtpLayer, self.layers[0]), cast("list[Keys]", kept)
        q, keys = layer.read(layer.input_layernorm(x), batch.positions + len(before))
        before.append(keys)
        states: Tensor = self.norm(layer.finish(x, layer.attend(q, before[0], before[1:], batch.visible())))
        return states
