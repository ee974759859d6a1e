"""Training of a judge: a linear head on a model's states that says whether the token which a state has read is good.

Data are answers with marked errors: JSON lines with `prompt` (text) or `messages`, `answer`, and where the answer is
wrong `mistake`, the first and the last character of the error (`[start, end)`, counted in the answer). Tokens of right
answers, and those before an error, are good (1); those of the error are bad (0); what follows it is not learned.

With h the state of the last layer before the final norm at a token, in units of its mean and deviation over the
training texts, the loss is the binary cross-entropy of sigmoid(w . h + b), each class weighted to count half. The model
stays as it is; what is written is w (hidden,) and b for raw states (`models.heads.StateJudge`).

The same head routes steps of reasoning (`search` method "arbitrage"): trained for the draft model, on steps whose last
token is marked.

Source: Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment (arXiv:2501.19309), section 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import PromptError
from paceline.models.heads import StateJudge
from paceline.training.answers import TrainingText
from paceline.training.batches import Batch, Document, TargetView, packed
from paceline.training.heads import Trainer
from paceline.training.train_config import TextTrainConfig, TrainConfig
from paceline.utils import text_of_file

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import Runner

BAD, GOOD = 0, 1
"""Columns of a batch: what a token is marked as."""

SEEN = 32
"""Rows of the training texts from which mean and deviation of states, and shares of the classes, are taken."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Holds an answer, and where its error is.

    Attributes:
        start, end: characters of the answer; None in one without an error.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str
    start: int | None = None
    end: int | None = None


def marked_answers(files: Sequence[Path]) -> list[Marked]:
    """Read answers with marked errors.

    Raises:
        PromptError: a file that cannot be read, or a line that is none, with its number.
    """
    found = []
    for file in files:
        lines = text_of_file(file).split("\n")  # texts may hold other separators of lines
        found += [_marked(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return found


def _marked(line: str, where: str) -> Marked:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is no JSON ({error}); give one answer a line") from None
    if not isinstance(row, dict) or not isinstance(row.get("answer"), str) or not row["answer"]:
        raise PromptError(f"{where} must be an object with a text `answer`")
    prompt, mistake = row.get("prompt", row.get("messages")), row.get("mistake")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
        raise PromptError(f"{where} must have a text `prompt`, or `messages`")
    if mistake is None:
        return Marked(prompt, row["answer"])
    fine = isinstance(mistake, list) and len(mistake) == 2 and all(type(place) is int for place in mistake)
    if not fine or not 0 <= mistake[0] < mistake[1] <= len(row["answer"]):
        raise PromptError(f"{where}: mistake must be [start, end) within the answer, got {mistake!r}")
    return Marked(prompt, row["answer"], *mistake)


def labels_of(written: Sequence[str], marked: Marked) -> list[int | None]:
    """GOOD, BAD, or None for what is not learned, of each token of an answer.

    Args:
        written: texts of the answer's first 1, 2, ... tokens.
    """
    if marked.start is None or marked.end is None:
        return [GOOD] * len(written)
    labels, before = list[int | None](), 0
    for text in written:
        first, last, before = before, len(text), len(text)
        labels.append(GOOD if last <= marked.start else BAD if first < marked.end else None)
    return labels


class JudgedView(TargetView):
    """Reads states of the model's last layer, and what tokens are marked as in place of columns of a vocabulary.

    Args:
        runner: of the model. labels: by the id of a text, of its answer's tokens.
    """

    def __init__(self, runner: Runner, labels: Mapping[str, Sequence[int | None]], *, keep_bytes: int) -> None:
        self.runner, self.vocabulary, self.labels = runner, torch.arange(2), labels
        self.layers, self.reads = (runner.info.num_layers - 1,), True
        self.rows = torch.zeros(2, runner.info.hidden_size, device=runner.info.device)
        self._column = torch.zeros(runner.info.vocab_size, dtype=torch.int64)
        self._kept, self._left, self.shards = {}, keep_bytes, None

    def filled(
        self, rows: Sequence[Sequence[Document]], length: int, states: Mapping[Document, tuple[Tensor, ...]]
    ) -> Batch:
        """See `TargetView.filled`; tokens that are not learned are not wanted."""
        batch = super().filled(rows, length, states)
        for i, row in enumerate(rows):
            start = 0
            for document in row:
                labels = self.labels[document.text][-len(document.tokens) + document.first :]
                for place, label in enumerate(labels, start + document.first):
                    if place < start + len(document.tokens):
                        batch.columns[i, place] = -1 if label is None else label
                        batch.wanted[i, place] = label is not None
                start += len(document.tokens)
        return batch


class JudgeTrainer(Trainer):
    """Trains a linear head that says whether tokens are good.

    Args:
        hidden: size of the states.
    """

    name: ClassVar[str] = "judge"
    config_class: ClassVar[type[TrainConfig]] = TextTrainConfig
    rate: ClassVar[float] = 1e-2
    drafts: ClassVar[bool] = False
    judged_as: ClassVar[str] = "judged as they are marked"
    mean: Tensor
    deviation: Tensor
    weights: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        hidden = rows.shape[1]
        self.depths = 1
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(hidden), persistent=False)
        self.register_buffer("deviation", torch.ones(hidden), persistent=False)
        self.register_buffer("weights", torch.ones(2), persistent=False)

    @classmethod
    def check_data(cls, data: Sequence[Path]) -> None:
        """See `Trainer.check_data`; both right and wrong answers are needed."""
        marked = marked_answers(data)
        if all(one.start is None for one in marked) or not marked:
            raise PromptError(f"no answer in {', '.join(map(str, data))} has a mistake; mark some")

    @classmethod
    def texts(cls, llm: LLM, config: TrainConfig) -> list[TrainingText]:
        """See `Trainer.texts`."""
        return [text for text, _ in cls._labelled(llm, config)]

    @classmethod
    def _labelled(cls, llm: LLM, config: TrainConfig) -> list[tuple[TrainingText, list[int | None]]]:
        found: dict[str, tuple[TrainingText, list[int | None]]] = {}
        for marked in marked_answers(config.data)[: config.most_prompts]:
            answer = llm.tokenizer.encode(marked.answer, add_special_tokens=False)
            prompt = _prompt_ids(llm, marked.prompt)
            name = sha256(json.dumps([prompt, answer, marked.start, marked.end]).encode()).hexdigest()
            written = [llm.tokenizer.decode(answer[: end + 1], False) for end in range(len(answer))]
            found[name] = TrainingText(name, prompt, answer), labels_of(written, marked)
        return list(found.values())

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[JudgeTrainer, TargetView]:
        """See `Trainer.init`; there is no draft vocabulary."""
        labels = {text.id: labels for text, labels in cls._labelled(llm, config)}
        view = JudgedView(llm.runner, labels, keep_bytes=config.feature_cache_bytes)
        return cls(view.rows), view

    @torch.no_grad()
    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """Mean and deviation of states, and how rare each class is."""
        batch = view.batch(packed(documents, length)[:SEEN], length)
        learned = batch.columns >= 0
        states = batch.taps[learned].float()
        self.mean.copy_(states.mean(0))
        self.deviation.copy_(states.std(0).clamp(min=1e-4))
        counts = torch.bincount(batch.columns[learned].flatten(), minlength=2).float()
        self.weights.copy_(counts.sum() / (2 * counts.clamp(min=1)))

    def _odds(self, states: Tensor) -> Tensor:
        normed = (states.float() - self.mean) / self.deviation
        return normed @ self.weight.float() + self.bias.float()

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        learned = batch.columns >= 0
        labels = batch.columns[learned]
        odds = self._odds(batch.taps[learned])
        each = F.binary_cross_entropy_with_logits(odds, labels.float(), reduction="none")
        weights = self.weights[labels]
        return (each * weights).sum() / weights.sum().clamp(min=1e-6) + 0.0 * self.bias.sum()

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Trainer.predict`: columns are what tokens are judged as."""
        at, _ = batch.learned(2)
        judged = (self._odds(batch.ahead(batch.taps, 2).flatten(0, 1)[at]) > 0).long()
        yield at, judged

    def head(self, facts: Mapping[str, Any]) -> StateJudge:
        """What it has learned, for raw states."""
        weight = (self.weight.detach() / self.deviation).float()
        bias = float(self.bias.detach() - (weight * self.mean).sum())
        return StateJudge(weight, bias, facts.get("target", {}), facts)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        self.head(facts).write(folder)

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        config = {"method": "draft_model", "model": "DRAFT", "acceptance_method": "judge", "judge_model": str(folder)}
        named = "" if model is None else f" -m {model}"
        return f"paceline generate{named} -s '{json.dumps(config)}'"


def _prompt_ids(llm: LLM, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.chat_ids(list(prompt))
