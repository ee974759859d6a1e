"""Training of maps between states (hidden transfer): made of a token's state at a middle layer, a state of a token to
come enters there, and the target's later layers are to say of it what they say of that token (`row_guesses` says what
is learned). The maps begin as the identity, so that a pseudo state is the token's own at the next positions.

The layers are those two thirds up and the ones above, one further for each token ahead.

Source: Parallel decoding via hidden transfer for lossless large language model acceleration (arXiv:2404.12022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.training.batches import TargetView
from paceline.training.row_guesses import DEPTHS, RowGuessConfig, RowGuessTrainer, RowsOfPass
from paceline.training.train_config import TrainConfig
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo


def _check_layers(name: str, value: Sequence[int]) -> None:
    """Reject what are no layers, the first one left out, in an order that never falls; ConfigError."""
    for layer in value:
        integer(name, layer, 1)
    need(len(value) > 0 and list(value) == sorted(value), name, "be one number or more that never fall", value)


@documented
@dataclass(frozen=True, kw_only=True)
class HiddenTransferConfig(RowGuessConfig):
    """Says where pseudo states enter."""

    transfer_layers: tuple[int, ...] | None = option(
        None, "Of hidden_transfer: before which states enter, 20,21,22; the count is --depths.", check=_check_layers
    )


class HiddenTransferTrainer(RowGuessTrainer):
    """Trains maps; see `RowGuessTrainer`.

    Args:
        transfer_layers: before which pseudo states enter, in an order that never falls.
    """

    name: ClassVar[str] = "hidden_transfer"
    config_class: ClassVar[type[TrainConfig]] = HiddenTransferConfig
    rate: ClassVar[float] = 3e-3

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, transfer_layers: Sequence[int], anchors: int
    ) -> None:
        super().__init__(folder, layers, rows, depths=len(transfer_layers), anchors=anchors)
        self.layers, width = tuple(transfer_layers), rows.shape[1]
        self.transfers = nn.ModuleList([nn.Linear(width, width) for _ in self.layers])
        with torch.no_grad():
            for transfer in self.transfers:
                cast(nn.Linear, transfer).weight.copy_(torch.eye(width))
                cast(nn.Linear, transfer).bias.zero_()

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, HiddenTransferConfig)
        layers, most = config.transfer_layers, target.num_layers - 1
        need(max(layers or (1,)) <= most, "transfer_layers", f"be at most {most}, the model's last", layers)
        fits = layers is None or config.depths in (None, len(layers))
        need(fits, "depths", "be left out with transfer_layers, one for each", config.depths)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[HiddenTransferTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, HiddenTransferConfig)
        view, count = cls.view_of(llm, config), llm.runner.info.num_layers
        usual = [max(1, min(count - 1, 2 * count // 3 + ahead)) for ahead in range(config.depths or DEPTHS)]
        layers = config.transfer_layers or usual
        return cls(llm.folder, count, view.rows, transfer_layers=layers, anchors=config.anchors), view

    def run(self, model: nn.Module, embedded: Tensor, rows: RowsOfPass, **given: Any) -> Tensor:
        """Rows that have not entered yet hold nothing, and nobody who has sees them."""
        x = torch.cat((embedded, embedded.new_zeros(len(rows.depths) - rows.tokens, embedded.shape[1])))
        place = torch.full((int(rows.anchors.max()) + 1,), -1, device=x.device)
        place[rows.anchors[: rows.tokens]] = torch.arange(rows.tokens, device=x.device)
        behind = place[rows.anchors]
        with ExitStack() as hooks:
            for layer in sorted(set(self.layers)):
                enter = partial(_hooked, partial(self._entered, rows.depths, behind, layer))
                handle = cast(Any, model).layers[layer].register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(handle.remove)
            return cast(Tensor, model(inputs_embeds=x[None], **given).last_hidden_state[0])

    def _entered(self, depths: Tensor, behind: Tensor, layer: int, states: Tensor) -> Tensor:
        """(r, hidden) states before a layer, with those that enter there; behind: (r,) row of each one's anchor."""
        entered = states
        for depth, transfer in enumerate(self.transfers, start=1):
            if self.layers[depth - 1] == layer:
                at = (depths == depth).nonzero().squeeze(1)
                entered = entered.index_copy(0, at, transfer(states[behind[at]]).to(entered.dtype))
        return entered

    def stored(self, llm: LLM) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        return {"taps": tuple(layer - 1 for layer in self.layers)}, tensors


def _hooked(
    change: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before a layer of transformers that changes its states (1, r, hidden), however they are given."""
    if "hidden_states" in named:
        return inputs, {**named, "hidden_states": change(named["hidden_states"][0])[None]}
    return (change(inputs[0][0])[None], *inputs[1:]), named
