"""Training of an adapter that makes an early exit speak like the whole target: Kangaroo's.

The adapter, a layer of attention alone, reads the exit's states of the whole text; its output goes through the target's
head. It learns the distribution that the target gives at the same place, over the whole vocabulary, since nothing keeps
it from drafting any token. It begins as the plain early exit: its attention adds nothing, its norm is the target's.

What is written has the published layout (paceline.models.runners.Adapter), in a Llama's names.

Source: Kangaroo: lossless self-speculative decoding via double early exiting (arXiv:2404.18911), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from paceline.models.heads import write_folder
from paceline.training.batches import Batch, TargetView
from paceline.training.heads import layer_of
from paceline.training.layer import AttentionLayer, RMSNorm
from paceline.training.next_token import NextTokenTrainer
from paceline.training.train_config import ExitConfig, TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo, Runner


class AdapterLayer(AttentionLayer):
    """Attention behind a norm, added to what it reads; at first nothing is added."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, layer["rms_norm_eps"])
        nn.init.zeros_(cast(nn.Linear, self.self_attn["o_proj"]).weight)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(b, t, d) of states (b, t, d)."""
        queries, keys = self.read(self.input_layernorm(x), batch.positions)
        return x + self.attend(queries, keys, (), batch.visible())


class KangarooTrainer(NextTokenTrainer):
    """Trains an adapter that makes an early exit speak like the whole target.

    Args:
        layer: `HeadConfig.layer` of a layer like the target's own. exit_layer: layers of the target before it.
        gains: (hidden,) of the target's final norm. rows, depths: as above.
    """

    name: ClassVar[str] = "kangaroo"
    config_class: ClassVar[type[TrainConfig]] = ExitConfig
    rate: ClassVar[float] = 2e-3

    def __init__(
        self, layer: Mapping[str, Any], exit_layer: int, gains: Tensor, rows: Tensor, depths: int | None = None
    ) -> None:
        super().__init__(rows, depths)
        self.layer, self.exit_layer = layer, exit_layer
        self.layers = nn.ModuleList([AdapterLayer(layer, len(gains))])
        self.norm = RMSNorm(len(gains), layer["rms_norm_eps"])
        with torch.no_grad():
            self.norm.weight.copy_(gains)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, ExitConfig)
        if config.exit_layer is not None:
            integer("exit_layer", config.exit_layer, 1, target.num_layers - 1)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[KangarooTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, ExitConfig)
        info, layer = llm.runner.info, layer_of(llm.runner)
        exit_layer = min(2, info.num_layers - 1) if config.exit_layer is None else config.exit_layer
        every = torch.arange(info.vocab_size)
        view = TargetView(llm.runner, (exit_layer - 1,), every, keep_bytes=config.feature_cache_bytes)
        gains = norm_gains(llm.runner, vocabulary[: min(64, info.max_context)].tolist(), layer["rms_norm_eps"])
        return cls(layer, exit_layer, gains, view.rows, config.depths), view

    def states(self, batch: Batch) -> Tensor:
        normed: Tensor = self.norm(self.layers[0](batch.taps, batch))
        return normed

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": llm.runner.info.hidden_size,
            "vocab_size": llm.runner.info.vocab_size,
            "num_hidden_layers": 1,
            **self.layer,
            "paceline_adapter": {"exit_layer": self.exit_layer, **facts},
        }
        dtype = llm.runner.info.dtype
        write_folder(folder, config, {name: parameter.to(dtype) for name, parameter in self.named_parameters()})

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "kangaroo", "model": str(folder), "exit_layer": self.exit_layer}


def norm_gains(runner: Runner, tokens: Sequence[int], eps: float) -> Tensor:
    """(hidden,) float32 weights of an RMSNorm that does what the final norm does to the states of a text."""
    last = runner.info.num_layers
    cache = runner.open()
    try:
        taps = runner.extend([cache], [tokens], taps=(last - 1, last)).taps
    finally:
        runner.release(cache)
    before, behind = taps[last - 1].float(), taps[last].float()
    unit = before * torch.rsqrt(before.square().mean(-1, keepdim=True) + eps)
    return ((unit * behind).sum(0) / unit.square().sum(0).clamp(min=1e-12)).clone()
