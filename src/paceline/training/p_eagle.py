"""Training of P-EAGLE heads: an EAGLE-3 that predicts `depths` tokens in one pass, from masks behind a text.

    rows of a pass: those of `masked_rows`, tokens without a state before them left out         (r,)
    depth 0 at token a: embedding of a, and g = fc of the target's states of token a - 1       (d,), (taps * d,)
    depth e behind a: embedding of the mask token, and fc(mask_hidden)
    layers: the first reads [norm(embedding); norm(g)], as EAGLE-3's, the others are a Llama's
    loss: divergence (`divergences`, KL by default) of each row from the target's distribution of token a + e + 1 over
        the draft vocabulary, the mean over all rows that an answer's token of that vocabulary follows; depths have the
        same weight

Embedding, mask_hidden, fc and layers are learned, the embedding from the target's own; the head's rows are the
target's. What is judged goes through the anchors of a row in parts, each with all tokens, so that long rows fit.

Source: P-EAGLE: parallel-drafting EAGLE with scalable training (arXiv:2602.01469); the `speculators` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch, TargetView
from paceline.training.divergences import DIVERGENCES
from paceline.training.eagle3 import Eagle3Layer, taps_of
from paceline.training.heads import HeadTrainer, SoftTargets, layer_of
from paceline.training.layer import RMSNorm, TrainableDecoderLayer
from paceline.training.masked_rows import MaskedConfig, MaskedRows, anchors_of, retained
from paceline.training.mtp import MtpLayer
from paceline.training.train_config import TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

DEPTHS: Final = 8
"""Tokens of a pass where nobody says how many, as the `speculators` package has it."""

AT_ONCE: Final = 256
"""Anchors whose masks are judged in one pass."""


@documented
@dataclass(frozen=True, kw_only=True)
class PEagleConfig(MaskedConfig):
    """Says how large a P-EAGLE head is, and what stands for tokens that are not known yet."""

    num_layers: int = option(4, "Decoder layers of the head.", low=1, high=64)
    mask_token_id: int | None = option(
        None, "Of the model's vocabulary, what stands for tokens to come; one that texts hardly hold by default.", low=0
    )
    loss_fn: str = option(
        "kl_div", f"How far a draft is from the model: {', '.join(DIVERGENCES)}.", choices=tuple(DIVERGENCES)
    )


class PEagleTrainer(HeadTrainer):
    """Trains a head to predict `depths` tokens in one pass.

    Args:
        config: of the head. rows: of the target's head, for the draft vocabulary.
        settings: with the shares that are retained, and `depths`.
    """

    name: ClassVar[str] = "p_eagle"
    config_class: ClassVar[type[TrainConfig]] = PEagleConfig

    def __init__(self, config: HeadConfig, rows: Tensor, settings: PEagleConfig) -> None:
        super().__init__(config, rows)
        self.settings, self.depths, d = settings, settings.depths or DEPTHS, config.hidden_size
        width, layer, eps = len(config.taps) * d, config.layer, config.layer.get("rms_norm_eps") or 1e-6
        self.embed = nn.Embedding(config.vocab_size, d)
        self.fc = nn.Linear(width, d, bias=False)
        later = (MtpLayer(layer, d) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList([Eagle3Layer(layer, d), *later])
        self.norm = RMSNorm(d, eps)
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, 1, width))
        with torch.no_grad():  # it begins with the last of the states, of which it reads the others little by little
            self.fc.weight.mul_(0.1)[:, -d:] += torch.eye(d)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, PEagleConfig)
        if config.mask_token_id is not None:
            integer("mask_token_id", config.mask_token_id, 0, target.vocab_size - 1)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[PEagleTrainer, TargetView]:
        assert isinstance(config, PEagleConfig)
        mask = unused_token(llm) if config.mask_token_id is None else config.mask_token_id
        head_config = cls.config_of(llm.runner.info, layer_of(llm.runner), len(vocabulary), config.depths or DEPTHS)
        head_config = replace(
            head_config, num_layers=config.num_layers, mask_token_id=mask, taps=config.taps or head_config.taps
        )
        view = TargetView(llm.runner, head_config.taps, vocabulary, keep_bytes=config.feature_cache_bytes)
        head = cls(head_config, view.rows, config)
        head.init_from(view)
        return head, view

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="p_eagle",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=taps_of(target.num_layers),
            mask_token_id=target.vocab_size - 1,
            layer=layer,
        )

    @torch.no_grad()
    def init_from(self, view: TargetView) -> None:
        """Begin with the target's embeddings, and for the mask with their mean."""
        embedding = view.embedding()
        embedding[self._mask] = embedding.mean(0)
        self.embed.weight.copy_(embedding)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        kept, targets = retained(batch, self.depths, self.settings, generator), self.soft_targets(batch)
        learned, known = anchors_of(batch, 0).cpu(), (batch.columns >= 0).cpu()
        total, count = self.rows.new_zeros(()), 0
        for i in range(len(batch.tokens)):
            rows = MaskedRows.of(with_state(batch, i), [one[i] for one in kept])
            drafts = (rows.depths > 0) | learned[i][rows.anchors]
            ahead = (rows.anchors + rows.depths + 1).clamp(max=batch.tokens.shape[1] - 1)
            picked = (drafts & known[i][ahead]).nonzero().squeeze(1)
            places = (ahead[picked] + i * batch.tokens.shape[1]).to(batch.tokens.device)
            total = total + self._divergence(targets, self.norm(self.states_of(batch, i, rows, picked)), places)
            count += len(picked)
        return total / max(1, count)

    def _divergence(self, targets: SoftTargets, states: Tensor, places: Tensor) -> Tensor:
        """The sum over rows of normed states (m, d) that predict the tokens at flat places (m,)."""
        if self.settings.loss_fn == "kl_div":  # but for the target's entropy, which does not depend on the head
            return targets.loss(states, self.rows, places)
        chances = targets.chances[targets.row[places]]
        return DIVERGENCES[self.settings.loss_fn](self.logits(states).float(), chances).sum()

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        anchors = torch.stack([anchors_of(batch, depth).cpu() for depth in range(self.depths)])
        found: list[list[Tensor]] = [[] for _ in anchors]
        for i in range(len(batch.tokens)):
            for part in anchors[0, i].nonzero().squeeze(1).split(AT_ONCE):
                chosen = torch.zeros_like(anchors[:, i])
                chosen[:, part] = anchors[:, i, part]
                rows = MaskedRows.of(with_state(batch, i), list(chosen[1:]))
                picked = ((rows.depths > 0) | chosen[0][rows.anchors]).nonzero().squeeze(1)
                best = self.logits(self.norm(self.states_of(batch, i, rows, picked))).argmax(-1)
                for depth, tokens in enumerate(best.split(chosen.sum(1).tolist())):
                    found[depth].append(tokens)
        for depth, parts in enumerate(found):
            at = batch.learned(depth + 2)[0]
            yield at, torch.cat(parts) if parts else at

    def states_of(self, batch: Batch, i: int, rows: MaskedRows, picked: Tensor) -> Tensor:
        """(m, d) states behind the last layer, before the norm, of some rows (m,) of a pass over packed row i."""
        device = batch.tokens.device
        anchors, depths, picked = rows.anchors.to(device), rows.depths.to(device), picked.to(device)
        masked = depths > 0
        state = torch.where(masked[:, None], self.fc(self.mask_hidden[0]), self.fc(batch.taps[i])[anchors - 1])[None]
        embedded = self.embed(torch.where(masked, self._mask, batch.tokens[i][anchors]))[None]
        positions = (batch.positions[i][anchors] + depths)[None]
        visible = rows.visible(batch.documents[i].cpu()).to(device)[None]
        first = cast(Eagle3Layer, self.layers[0])
        reads = torch.cat((first.input_layernorm(embedded), first.hidden_norm(state)), -1)
        for number, layer in enumerate(cast(Sequence[TrainableDecoderLayer], self.layers)):
            if isinstance(layer, MtpLayer):
                reads = layer.input_layernorm(state)
            q, keys = layer.read(reads, positions)
            if number == len(self.layers) - 1:
                q, state, visible = q[:, :, picked], state[:, picked], visible[:, picked]
            state = layer.finish(state, layer.attend(q, keys, [], visible))
        return state[0]

    @property
    def _mask(self) -> int:
        assert self.config.mask_token_id is not None
        return self.config.mask_token_id


def with_state(batch: Batch, i: int) -> Tensor:
    """(n,) places of the tokens of packed row i that have one before them in their document."""
    return ((batch.documents[i] >= 0) & (batch.positions[i] > 0)).nonzero().squeeze(1)


def unused_token(llm: LLM) -> int:
    """The first id of the model's vocabulary that is no token, or else the last one."""
    size, tokens = llm.runner.info.vocab_size, set(llm.tokenizer.tokens())
    return next((token for token in range(size) if token not in tokens), size - 1)
