"""The process that trains a drafter while it is served (Online Speculative Decoding): it reads jobs from standard input
and writes results, one job at a time (`paceline.drafters.learning` is the other end).

    {"trainer", "folder", "name", "target"} with tokens (v,), rows (v, d)   what is served -> {} or {"error"}
    {"base", "current", "output", "learned", "replayed", ...} with records   a round -> {"best", "tokens_a_pass"}
    {"paused"}                                                               wait between steps, or go on

A record has tokens (t,), states (n, width) of the target that the drafter read, embedded (t, d), and at (m,), ids
(m, k), logits (m, k): where a draft was rejected, and the target's likeliest tokens there. A step learns one record by
the method's own loss at these positions alone, whose targets are the k tokens, renormalised over the draft vocabulary.
A replay drafts behind every token of records that were not learned, as the trainer predicts; it counts tokens a pass.

Weights are kept in float32 from round to round; the optimizer begins anew in each, so that jobs depend on nothing else.

Source: Online Speculative Decoding (arXiv:2310.07177).
"""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from paceline.checkpoints import open_checkpoint, read_config
from paceline.drafters.learning import receive, send
from paceline.errors import CheckpointError
from paceline.models import ModelInfo
from paceline.models.heads import HeadConfig, read_head, write_head
from paceline.training.batches import Batch, RecordedBatch
from paceline.training.draft_model import SlicedTrainer, with_layers, write_beside
from paceline.training.heads import Trainer, trainer
from paceline.training.judging import chain_length, counted, shares
from paceline.training.optimizing import groups, set_rate, update
from paceline.utils import described

SHARE: Final = 0.2
"""Of a method's peak rate in training, by which it learns here."""

WARMUP: Final = 8
"""Steps of a round over which the rate rises."""

MOST: Final = 0.5
"""Norm that gradients are cut to."""

DECAY: Final = 0.01
"""Of weights."""

FROZEN: Final = ("draft_to_target", "head.weight", "embed.weight")
"""Tensors of a head that stay as they are."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """Says what is served.

    Attributes:
        trainer: name of the one that trains it further. target: what it drafts for, as it would be on this CPU.
        tokens: (v,) ids that it can draft, None for all; of a head, which says so itself, not looked at.
        rows: (v, d) float32 of the target's head; empty where they are not needed.
    """

    trainer: str
    target: ModelInfo
    tokens: Tensor | None
    rows: Tensor

    @classmethod
    def of(cls, header: Mapping[str, Any], tensors: Tensors) -> Subject:
        """The one of an opening message."""
        facts = {key: value for key, value in header["target"].items() if key != "dtype"}
        target = ModelInfo(**facts, device=torch.device("cpu"), dtype=torch.float32, weight_bytes=0)
        return cls(header["trainer"], target, tensors.get("tokens"), tensors.get("rows", torch.empty(0)))


class Served(ABC):
    """Holds one version of what is served.

    Attributes:
        module: trains it. vocabulary: (v,) ids of its columns.
        reads_taps: it reads several layers of the target.
    """

    module: Trainer
    vocabulary: Tensor
    reads_taps: bool = False

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write it, in float32, so that a drafter can be made of it, and read by `served`."""

    def embedded(self, record: Tensors) -> Tensor:
        """(t, d) embeddings of a record's tokens."""
        return record.get("embedded", torch.zeros(len(record["tokens"]), 0)).float()


class ServedHead(Served):
    """A trained head, in the format of `paceline.models.heads` or one of another engine's.

    Raises:
        CheckpointError: a head with tensors that its trainer does not learn.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._config, weights = read_head(folder, subject.target, dtype=torch.float32)
        everything = torch.arange(subject.target.vocab_size)
        self.vocabulary, self.reads_taps = weights.get("draft_to_target", everything), self._config.method == "eagle3"
        self._frozen = {name: weights.pop(name) for name in FROZEN if name in weights}
        self._keeps_rows = self._config.method not in ("eagle", "eagle3") or "draft_to_target" in self._frozen
        rows = self._frozen.get("head.weight", subject.rows)
        self.module = _module(subject.trainer, self._config, rows)
        parameters = dict(self.module.named_parameters())
        absent = {name: torch.zeros_like(one) for name, one in parameters.items() if name.endswith(".bias")}
        weights = absent | weights  # a head without biases learns some
        other = {name for name, one in weights.items() if name in parameters and one.shape != parameters[name].shape}
        if different := sorted(other | (parameters.keys() ^ weights.keys())):
            raise CheckpointError(
                f"the head {folder} differs by {different[0]} from what its trainer learns; train one with `paceline "
                f"train {subject.trainer}`"
            )
        self.module.load_state_dict(weights, strict=False)

    def write(self, folder: Path) -> None:
        rows = {"head.weight": self.module.rows} if self._keeps_rows and self.module.rows.numel() else {}
        learned = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        own_rows = {} if any(".head." in name for name in learned) else rows
        write_head(folder, replace(self._config, target={}, provenance={}), own_rows | self._frozen | learned)

    def embedded(self, record: Tensors) -> Tensor:
        own = self._frozen.get("embed.weight")
        return super().embedded(record) if own is None else own[record["tokens"]]


def _module(name: str, config: HeadConfig, rows: Tensor) -> Trainer:
    method: Any = trainer(name)
    module: Trainer = method(config, rows)
    return module


class ServedDraft(Served):
    """A draft model, whose layers and final norm are learned; embedding and head stay as they are."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._folder, self._config = folder, read_config(folder)
        stored = open_checkpoint(folder, self._config)
        name = "lm_head.weight" if "lm_head.weight" in stored.entries else "model.embed_tokens.weight"
        if name not in stored.entries:
            raise CheckpointError(f"the draft model {folder} holds no {name}, so that it cannot be trained here")
        rows = stored.tensor(name).float()
        count = min(len(rows), subject.target.vocab_size)
        tokens = torch.arange(count) if subject.tokens is None else subject.tokens
        self.vocabulary = tokens[tokens < count]
        self._sliced = SlicedTrainer(folder, range(self._config["num_hidden_layers"]), rows[self.vocabulary])
        self.module = self._sliced

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        write_beside(folder, self._folder, self._config, with_layers(self._folder, self._sliced.model))


def served(subject: Subject, folder: Path) -> Served:
    """One version of what is served.

    Raises:
        PacelineError: it cannot be trained.
    """
    return ServedDraft(subject, folder) if subject.trainer == "draft_model" else ServedHead(subject, folder)


def batch_of(version: Served, target: ModelInfo, record: Tensors, first: int, *, rejected: bool) -> Batch:
    """A record as a batch of one row.

    Args:
        first: index of the first token that the target wrote.
        rejected: what is to be learned is where a draft was rejected; otherwise all that the target wrote.
    """
    tokens, d = record["tokens"], target.hidden_size
    length, column = len(tokens), torch.full((target.vocab_size,), -1)
    column[version.vocabulary] = torch.arange(len(version.vocabulary))
    states = record.get("states", torch.zeros(0, d)).float()
    read = torch.zeros(1, length, states.shape[1])
    read[0, : len(states)] = states[:length]
    wanted, none = torch.arange(length) >= first, torch.zeros(1, length, 0)
    columns = torch.where(wanted, column[tokens], -1)
    batch = Batch(
        tokens=tokens[None], documents=torch.zeros(1, length, dtype=torch.int64), positions=torch.arange(length)[None],
        columns=columns[None], wanted=wanted[None], embedded=version.embedded(record)[None],
        taps=read if version.reads_taps else none, final=torch.zeros(1, length, d) if version.reads_taps else read,
    )  # fmt: skip
    if not rejected:
        return batch
    columns, chances = _targets(record, column, columns, len(version.vocabulary))
    return RecordedBatch.of(replace(batch, columns=columns[None]), chances)


def _targets(record: Tensors, column: Tensor, columns: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(t,) columns of the tokens where a draft was rejected, -1 elsewhere, and (m, size) the target's chances there;
    positions are left out of which the draft vocabulary has nothing.
    """
    rejected, at = torch.full_like(columns, -1), record["at"]
    if not len(at):
        return rejected, torch.zeros(0, size)
    inside = column[record["ids"]]
    known = (inside >= 0).any(1) & (columns[at] >= 0)
    at, inside, logits = at[known], inside[known], record["logits"][known].float()
    weights = logits.masked_fill(inside < 0, float("-inf")).softmax(-1)
    rejected[at] = columns[at]
    return rejected, torch.zeros(len(at), size).scatter_add_(1, inside.clamp(min=0), weights)


@torch.no_grad()
def replayed(module: Trainer, batches: Sequence[Batch]) -> float:
    """Tokens a pass that the likeliest drafts would give on texts."""
    module.eval()
    totals = torch.cat([counted(module, batch) for batch in batches], -1).double().sum(-1)
    return chain_length(shares(totals.numpy()))


def fit(module: Trainer, batches: Sequence[Batch], rate: float, seed: int, may_go_on: Event) -> None:
    """A step for each batch from which something can be learned.

    Args:
        rate: of AdamW. may_go_on: waited for before each step.
    """
    module.train()
    optimizer = torch.optim.AdamW(groups(module, DECAY), lr=rate, betas=(0.9, 0.95))
    for step, batch in enumerate(batches):
        may_go_on.wait()
        if not bool((batch.columns >= 0).any()):
            continue
        set_rate(optimizer, rate * min(1.0, (step + 1) / WARMUP))
        update(module, optimizer, module.loss(batch, torch.Generator().manual_seed(seed * 1_000_003 + step)), MOST)


class OnlineTraining:
    """Answers jobs.

    Args:
        may_go_on: is clear while the server wants its cores for requests.
    """

    def __init__(self, subject: Subject, may_go_on: Event) -> None:
        self._subject, self._may_go_on = subject, may_go_on

    def round(self, job: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
        """Train the current version further, replay it, the base and the candidate, and write that if it is the best.

        Returns:
            "best" (base, current or candidate; of equal ones the current) and "tokens_a_pass" of each.
        """
        records = [_of(tensors, number) for number in range(job["learned"] + job["replayed"])]
        pairs = list(zip(records, job["first"], strict=True))
        target, version = self._subject.target, served(self._subject, Path(job["current"]))
        held = [batch_of(version, target, *pair, rejected=False) for pair in pairs[job["learned"] :]]
        found = {"current": replayed(version.module, held)}
        if job["base"] != job["current"]:
            found["base"] = replayed(served(self._subject, Path(job["base"])).module, held)
        batches = [batch_of(version, target, *pair, rejected=True) for pair in pairs[: job["learned"]]]
        rate = job["learning_rate"]
        rate = SHARE * version.module.rate if rate is None else rate
        fit(version.module, batches, rate, job["seed"], self._may_go_on)
        found["candidate"] = replayed(version.module, held)
        best = max(found, key=lambda name: found[name])
        if best == "candidate":
            version.write(Path(job["output"]))
        return {"best": best, "tokens_a_pass": found}


def _of(tensors: Tensors, number: int) -> Tensors:
    """One record of a message."""
    start = f"{number}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


class Inbox:
    """Reads messages on a thread of its own, so that a pause has its effect in the middle of a job. The process ends
    with the server that it belongs to.

    Attributes:
        may_go_on: is clear from a pause on.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self.may_go_on, self._jobs = Event(), SimpleQueue[tuple[dict[str, Any], Tensors]]()
        self.may_go_on.set()
        Thread(target=self._read, args=(pipe,), daemon=True).start()

    def next(self) -> tuple[dict[str, Any], Tensors]:
        """The next job."""
        return self._jobs.get()

    def _read(self, pipe: BinaryIO) -> None:
        while True:
            try:
                header, tensors = receive(pipe)
            except EOFError:
                os._exit(0)
            if "paused" not in header:
                self._jobs.put((header, tensors))
            elif header["paused"]:
                self.may_go_on.clear()
            else:
                self.may_go_on.set()


def main() -> None:
    """Answer jobs until nobody sends any."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, with which this ends
    torch.set_num_threads(1)
    inbox = Inbox(sys.stdin.buffer)
    training: OnlineTraining | None = None
    while True:
        header, tensors = inbox.next()
        try:
            if training is None:
                subject = Subject.of(header, tensors)
                served(subject, Path(header["folder"]))
                training, answer = OnlineTraining(subject, inbox.may_go_on), dict[str, Any]()
            else:
                answer = training.round(header, tensors)
        except Exception as error:
            answer = {"error": f"{header.get('name', 'a round')} cannot be trained ({described(error)})"}
        send(answers, answer)


if __name__ == "__main__":
    main()
