"""SpecDec++: a head on a draft model's states learns to foretell whether the target accepts a drafted token.

Of each answer x_1 ... x_n of the target, with its distribution p and the draft model's q behind x_1 ... x_(t-1):

    y_t ~ q                              what would be drafted; at temperature 0 q's likeliest token
    c_t = min(1, p(y_t) / q(y_t))        how likely it is accepted; at temperature 0 whether it is p's likeliest too
    z_t = x_t with chance `target_share`, else y_t

The draft model reads z, and the head learns c_t from its state of z_t wherever that is y_t. Both models stay as they
are. The loss is the cross-entropy of (rejected, accepted) in which rejections weigh `rejection_weight`:

    loss = sum_t -(w (1 - c_t) log f_0(h_t) + c_t log f_1(h_t)) / sum_t (w (1 - c_t) + c_t)

It is judged by whether each token turns out as foretold (drawn from c_t, once), that weight taken out again.

Source: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from paceline.checkpoints import RUN_SETTINGS, Tokenizer, resolve, same_tokenizer
from paceline.config import documented, option
from paceline.drafters.common import fit_rows
from paceline.errors import CapabilityError, ConfigError
from paceline.models import has_ability, load_runner
from paceline.models.heads import AcceptanceHead
from paceline.training.batches import Batch, Document, RecordedBatch, TargetView
from paceline.training.heads import Trainer
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo, Runner

REJECTED: Final = 0
ACCEPTED: Final = 1
"""Columns of a batch and of the head."""


@documented
@dataclass(frozen=True, kw_only=True)
class SpecDecPPConfig(TrainConfig):
    """Says for which draft model the head is, and how it learns."""

    draft_model: str | None = option(None, "Folder or hub id of the draft model.")
    num_blocks: int = option(3, "Residual blocks of the head.", low=0, high=16)
    target_share: float = option(
        0.15, "Of tokens that the draft model reads, those of the target's answer; the others are drafted.",
        low=0.0, high=0.99, rule="be in 0..0.99",
    )  # fmt: skip
    rejection_weight: float = option(6.0, "Of a rejection, that of an acceptance being 1.", low=0.0, high=1e6,
                                     rule="be above 0", open_low=True)  # fmt: skip
    temperature: float = option(1.0, "At which it will be drafted; 0 is greedy.", low=0.0, high=100.0)


class Drafted(NamedTuple):
    """What would be drafted behind each beginning of a text.

    Attributes:
        tokens: (n,) int64 y_t; of the first token of a text, which nothing comes before, the text's own.
        chances: (n,) float32 c_t.
    """

    tokens: Tensor
    chances: Tensor


def drafted(p_logits: Tensor, q_logits: Tensor, temperature: float, generator: torch.Generator) -> Drafted:
    """Draft one token at each place, and say how likely it is accepted.

    Args:
        p_logits, q_logits: (n, v) of the target and of the draft model.
        temperature: of both; 0 takes the likeliest tokens.
        generator: of the draws, on the CPU.
    """
    if temperature <= 0:
        tokens = q_logits.argmax(-1)
        return Drafted(tokens.cpu(), (p_logits.argmax(-1) == tokens).float().cpu())
    p, q = ((logits.float() / temperature).softmax(-1).cpu() for logits in (p_logits, q_logits))
    tokens = torch.multinomial(q, 1, generator=generator)
    ratio = p.gather(1, tokens) / q.gather(1, tokens).clamp(min=torch.finfo(torch.float32).tiny)
    return Drafted(tokens.squeeze(1), ratio.clamp(max=1.0).squeeze(1))


class AcceptanceView(TargetView):
    """Reads states of the draft model on mixed texts, with what becomes of their drafted tokens as columns.

    Args:
        target, draft: both models. config: of the run. keep_bytes: as of `TargetView`.
    """

    def __init__(self, target: Runner, draft: Runner, config: SpecDecPPConfig, *, keep_bytes: int) -> None:
        self.runner, self.target, self.config = draft, target, config
        self.vocabulary, self.layers, self.reads = torch.arange(2), (), True
        self.rows = torch.zeros(2, draft.info.hidden_size, device=draft.info.device)
        self._column = torch.zeros(draft.info.vocab_size, dtype=torch.int64)
        self._kept, self._left, self.shards = {}, keep_bytes, None

    def filled(
        self, rows: Sequence[Sequence[Document]], length: int, states: Mapping[Document, tuple[Tensor, ...]]
    ) -> RecordedBatch:
        """See `TargetView.filled`; chances of both columns are recorded for what is learned."""
        batch, chances = super().filled(rows, length, states), []
        for i, row in enumerate(rows):
            start = 0
            for document in row:
                _, _, columns, accepted = states[document]
                at = slice(start, start + len(document.tokens))
                batch.columns[i, at], batch.wanted[i, at] = columns, columns >= 0
                chances.append(accepted[columns >= 0])
                start = at.stop
        found = torch.cat(chances).to(self.rows.device)
        return RecordedBatch.of(batch, torch.stack((1 - found, found), -1))

    def _computed(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, ...]]:
        for document in documents:
            yield self._of(document)

    def _of(self, document: Document) -> tuple[Tensor, ...]:
        """Nothing of other layers; (n, d) states of the mixed text; (n,) int64 columns, -1 where nothing is learned;
        (n,) float32 chances of acceptance.
        """
        text, seed = document.tokens, sha256(json.dumps(document.tokens).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        p, q = (_logits(runner, text) for runner in (self.target, self.runner))
        tokens, accepted = drafted(p, fit_rows(q, p.shape[-1]), self.config.temperature, generator)
        first = torch.tensor(text[:1])
        tokens, accepted = torch.cat((first, tokens[:-1])), torch.cat((torch.ones(1), accepted[:-1]))
        place = torch.arange(len(text))
        own = (torch.rand(len(text), generator=generator) < self.config.target_share) | (place < document.first)
        read = torch.where(own, torch.tensor(text), tokens).tolist()
        turned_out = (torch.rand(len(text), generator=generator) < accepted).long()
        states = _states(self.runner, read)
        return states[:, :0], states, torch.where(own, -1, turned_out), accepted


def _logits(runner: Runner, text: Sequence[int]) -> Tensor:
    """(n, v) behind each token of a text."""
    cache = runner.open()
    try:
        return runner.extend([cache], [text], all_logits=True).logits
    finally:
        runner.release(cache)


def _states(runner: Runner, text: Sequence[int]) -> Tensor:
    """(n, d) behind the final norm, of each token of a text."""
    cache, last = runner.open(), runner.info.num_layers
    try:
        return runner.extend([cache], [text], taps=(last,)).taps[last].clone()
    finally:
        runner.release(cache)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), of states (..., d)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))


class SpecDecPPTrainer(Trainer):
    """Trains a head that foretells from a draft model's states whether the target accepts what it drafts.

    At first it foretells the same of all tokens.

    Args:
        rows: (2, d), not looked at but for their shape and device. config: of the run.
        draft: of the draft model, as it was named, and facts of it.
    """

    name: ClassVar[str] = "specdec_pp"
    config_class: ClassVar[type[TrainConfig]] = SpecDecPPConfig
    drafts: ClassVar[bool] = False
    judged_as: ClassVar[str] = "accepted or rejected as foretold"

    def __init__(self, rows: Tensor, config: SpecDecPPConfig, draft: Mapping[str, str]) -> None:
        super().__init__(rows)
        hidden, self.depths = rows.shape[1], 1
        self.settings, self.draft = config, draft
        self.model = nn.Sequential(*(ResidualBlock(hidden) for _ in range(config.num_blocks)), nn.Linear(hidden, 2))
        for parameter in self.model[-1].parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, SpecDecPPConfig)
        named = isinstance(config.draft_model, str) and config.draft_model != ""
        need(named, "draft_model", "be the folder or hub id of a draft model for specdec_pp", config.draft_model)
        rule = "be 0 for specdec_pp, which reads mixed texts of its own"
        need(config.feature_disk_bytes == 0, "feature_disk_bytes (--feature-disk-gib)", rule, config.feature_disk_bytes)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[SpecDecPPTrainer, TargetView]:
        """See `Trainer.init`; there is no draft vocabulary.

        Raises:
            ConfigError: a draft model with another tokenizer.
            CapabilityError: one that does not give its states. CheckpointError: nothing to load there.
        """
        assert isinstance(config, SpecDecPPConfig)
        name = str(config.draft_model)
        folder, info = resolve(name), llm.runner.info
        tokenizer = Tokenizer.load(folder)
        if why := same_tokenizer(llm.tokenizer, tokenizer):
            raise ConfigError(f"draft_model must have the model's tokenizer, got {name!r}: {why}")
        draft = load_runner(folder, device=str(info.device), dtype=str(info.dtype).removeprefix("torch."))
        if not has_ability(draft, "taps"):
            raise CapabilityError(f"draft_model must give its states, which {name} does not as it runs here")
        view = AcceptanceView(llm.runner, draft, config, keep_bytes=config.feature_cache_bytes)
        facts = {"name": name, "fingerprint": draft.info.fingerprint, "tokenizer": tokenizer.fingerprint()}
        return cls(view.rows, config, facts), view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        assert isinstance(batch, RecordedBatch)
        logits: Tensor = self.model(batch.final[batch.columns >= 0]).float()
        weights = batch.chances * batch.chances.new_tensor((self.settings.rejection_weight, 1.0))
        return -(weights * logits.log_softmax(-1)).sum() / weights.sum().clamp(min=1e-6)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Trainer.predict`: columns are what becomes of drafted tokens."""
        at, _ = batch.learned(2)
        logits = self.model(batch.ahead(batch.final, 2).flatten(0, 1)[at]).float()
        odds = logits[:, ACCEPTED] - logits[:, REJECTED] + math.log(self.settings.rejection_weight)
        yield at, (odds > 0).long()

    def head(self, facts: Mapping[str, Any]) -> AcceptanceHead:
        """What it has learned."""
        named = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        weights = [one for name, one in named.items() if name.endswith("weight")]
        biases = [one for name, one in named.items() if name.endswith("bias")]
        *blocks, last = zip(weights, biases, strict=True)
        how = {"rejection_weight": self.settings.rejection_weight, "temperature": self.settings.temperature}
        return AcceptanceHead(blocks, last, {"draft": dict(self.draft), **how, **facts})

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        self.head(facts).write(folder)

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        draft = json.loads((folder / RUN_SETTINGS).read_text())["draft_model"]
        named = "" if model is None else f" -m {shlex.quote(model)}"
        config = json.dumps({"method": "draft_model", "model": draft, "acceptance_head": str(folder)})
        return f"paceline generate{named} -s {shlex.quote(config)}"
