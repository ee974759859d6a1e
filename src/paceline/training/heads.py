"""What is trained: a module with a loss and a view of the data, that is written as a folder.

`train` makes a trainer with `init`, lets it learn by its `loss`, judges it by what it would `predict`, and has it
`write` a folder. `Trainer` is what the loop knows, `HeadTrainer` what heads share. Methods are modules of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from paceline import registry
from paceline.errors import PromptError
from paceline.models.heads import write_head
from paceline.training.answers import Asked, TrainingText, prompts_of, texts_of
from paceline.training.batches import Batch, Document, RecordedBatch, TargetView
from paceline.training.train_config import Fitting, TrainConfig
from paceline.utils import read_prompts, reject_unknown

if TYPE_CHECKING:
    from paceline.engine import Prompt, ReadPrompt
    from paceline.llm import LLM
    from paceline.models import ModelInfo, Runner
    from paceline.models.heads import HeadConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Says what is learned before the target's answers, and how.

    Attributes:
        name: of its folder in the run's, and in the report.
        texts: learned as they are, without the target.
    """

    name: str
    texts: Sequence[TrainingText]
    fitting: Fitting


def trainer(method: str) -> type[Trainer]:
    """The class of a name of the registry, or of "module:Class".

    Raises:
        ConfigError: an unknown name, or what is no trainer.
    """
    trainer_class: type[Trainer] = registry.load("trainers", method)
    registry.check_derives("trainers", method, trainer_class, Trainer)
    return trainer_class


def training_config(method: str, **settings: Any) -> TrainConfig:
    """The configuration of a method's training, with the method's own settings among others.

    Raises:
        ConfigError: an unknown method or setting, or a value outside its range.
    """
    config_class = trainer(method).config_class
    reject_unknown(f"training of {method}", settings, [field.name for field in fields(config_class)])
    return config_class(method=method, **settings)


class Trainer(nn.Module):
    """Learns to draft for a target, or makes an adapter or another model of it; what `train` needs of a method.

    Args:
        rows: (v, hidden) of the target's head for the draft vocabulary; they stay as they are.
    Attributes:
        name: of the method. config_class: what a user may set.
        rate: usual peak of the learning rate.
        drafts: what is written drafts for the target; otherwise it is an adapter of it, another model, or a judge.
        judged_as: what tokens are that it is right about, where it does not draft.
        replaces_target: what is written is a model in place of the target.
        reads_sources: the model's texts follow from sources that its encoder reads, and go no further than their ends.
        learns: its weights change; otherwise a run only judges and chooses.
        depths: how many tokens ahead it is judged by.
        done: how much of the run lies behind, from 0 to 1; the loop says so before each step.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[TrainConfig]] = TrainConfig
    rate: ClassVar[float] = 1e-3
    drafts: ClassVar[bool] = True
    judged_as: ClassVar[str] = "now the likeliest ones"
    replaces_target: ClassVar[bool] = False
    reads_sources: ClassVar[bool] = False
    learns: bool = True
    depths: int
    done: float = 0.0
    rows: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows, persistent=False)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        """Reject what this model cannot give, before it answers.

        Raises:
            ConfigError: a setting outside the model's range.
        """

    @classmethod
    def check_data(cls, data: Sequence[Path]) -> None:
        """Read what is to be learned from, so that what is wrong with it is told before a model is loaded.

        Raises:
            PromptError: what cannot be read, or holds no texts.
        """
        for file in data:
            if not read_prompts(file).conversations:
                raise PromptError(
                    f"{str(file)!r} holds lengths of prompts and no texts; give a file of prompts or texts"
                )

    @classmethod
    def prompts(cls, llm: LLM, config: TrainConfig) -> Asked:
        """What the model is asked, by the ids of its answers; without `config.texts`.

        Raises:
            PromptError: what cannot be read, or holds nothing of the right length. CapabilityError: the wrong kind of
                model.
        """
        return prompts_of(llm, config.data, most=config.most_prompts, longest=config.fitting.row_tokens // 2)

    @classmethod
    def texts(cls, llm: LLM, config: TrainConfig) -> list[TrainingText]:
        """What is learned as it is, with `config.texts`.

        Raises:
            PromptError: what cannot be read.
        """
        return texts_of(llm, config.data, most=config.most_prompts)

    @classmethod
    @abstractmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[Trainer, TargetView]:
        """Make a trainer that has learned nothing yet, and its view of the target, by which batches are read.

        Args:
            llm: the target, with its tokenizer and its folder. config: of `config_class`.
            vocabulary: (v,) int64 ids of the draft vocabulary, ascending.
        """

    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """Look at documents that it will learn, cut into rows of so many tokens, before the first step.

        It runs whenever a run begins or goes on, and before the trainer is judged for the first time: what is prepared
        counts as known before training. Parameters are then those of the stopped run; other tensors stay as made here.
        """

    @classmethod
    def stages(cls, llm: LLM, config: TrainConfig) -> list[Stage]:
        """Give what it learns before `config.data`, in turn; by default nothing.

        Raises:
            PromptError: what cannot be read.
        """
        del llm, config
        return []

    def relative_size(self, llm: LLM) -> float | None:
        """Give the weights that one drafted token reads, those of the target's pass being 1; None where nobody asks."""
        del llm
        return None

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute what training makes less: a scalar, per learned token.

        It depends on a parameter, which a trainer that only counts (in `prepare`) must have too.

        Args:
            generator: of noise, so that a step depends on its number alone.
        """

    def forward(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute the loss in a way that accelerate sees, which adds the gradients of other processes."""
        return self.loss(batch, generator)

    @abstractmethod
    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the likeliest drafts on a text, by which the trainer is judged.

        Yields:
            By depth, from 0 to `depths` - 1: (m,) int64 flat positions as `Batch.learned(depth + 2)` gives them, and
            (m,) int64 the column of the likeliest token there, whether or not the drafts before it are right.
        """

    def choose(self, view: TargetView, documents: Sequence[Document], length: int) -> None:
        """Choose what follows from the best state, such as thresholds, on the documents that chose it.

        Args:
            length: tokens of a row.
        """

    @abstractmethod
    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Write what it has learned, in files of any kind, into a folder that is there.

        Once it returns, the folder counts as finished. A file that a reader looks for comes last and whole
        (`utils.replacing`).

        Args:
            facts: where it comes from, to be kept with it; `facts["target"]` names the target.
        """

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        """Give the `speculative_config` that drafts with what was written; {} of what does not draft."""
        del folder
        return {}

    def timed_prompts(self, view: TargetView, documents: Sequence[Document]) -> Sequence[Prompt | ReadPrompt]:
        """What is asked to see how fast it drafts: prompts of these documents, or the first half of a text that has
        none.
        """
        del view
        return [{"prompt_token_ids": list(prompt_of(document))} for document in documents]

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        """The command that uses what was written, said at the end of `paceline train`; "" where there is none. That of
        a drafter is made of its `speculative_config`.

        Args:
            model: as it was named on the command line; None is the bundled one.
        """
        del folder, model
        return ""

    def logits(self, states: Tensor) -> Tensor:
        """Compute (m, v) logits over the draft vocabulary from normed states (m, hidden), by the target's head."""
        return states @ self.rows.T.to(states.dtype)

    def soft_targets(self, batch: Batch) -> SoftTargets:
        """Compute the target's distributions over the draft vocabulary at the tokens that are learned."""
        at = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        row = torch.full_like(batch.tokens.flatten(), -1)
        row[at] = torch.arange(len(at), device=at.device)
        if isinstance(batch, RecordedBatch):
            return SoftTargets(row, batch.chances)
        return SoftTargets(row, self.logits(batch.final.flatten(0, 1)[at - 1]).softmax(-1, dtype=torch.float32))


class HeadTrainer(Trainer):
    """Trains a head that drafts from the target's states; a method adds its module, its loss and what it predicts.

    Args:
        config: of the head. rows: as above.
    """

    def __init__(self, config: HeadConfig, rows: Tensor) -> None:
        super().__init__(rows)
        self.config = config

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[HeadTrainer, TargetView]:
        depths = {} if config.depths is None else {"depths": config.depths}
        head_config = cls.config_of(llm.runner.info, layer_of(llm.runner), len(vocabulary), config.depths or 4)
        head_config = cls.sized(head_config, config)
        view = TargetView(llm.runner, head_config.taps, vocabulary, keep_bytes=config.feature_cache_bytes)
        head = cls(head_config, view.rows, **depths)
        head.init_from(view)
        return head, view

    @classmethod
    @abstractmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        """Make the config of a head for a target.

        Args:
            layer: `HeadConfig.layer` of a layer like the target's own. depths: as wanted, for methods with a head each.
        """

    @classmethod
    def sized(cls, head: HeadConfig, config: TrainConfig) -> HeadConfig:
        """Change the config of a head as the user's settings say."""
        return head if config.taps is None else replace(head, taps=config.taps)

    def init_from(self, view: TargetView) -> None:
        """Copy what the head takes over from the target, such as its embedding; by default nothing."""

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Write the head in the format of `paceline.models.heads`."""
        tensors = {name: parameter.to(llm.runner.info.dtype) for name, parameter in self.named_parameters()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            tensors["draft_to_target"] = view.vocabulary
        write_head(folder, replace(self.config, provenance=facts, target=facts["target"]), tensors)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": self.config.method, "model": str(folder)}


def prompt_of(document: Document) -> tuple[int, ...]:
    """What is asked to see how an answer goes on: the prompt, or the first half of a text that has none."""
    half = max(2, len(document.tokens) // 2)
    return document.tokens[: document.first if document.first > 2 else half]


def layer_of(runner: Runner) -> dict[str, Any]:
    """`HeadConfig.layer` of a layer like the target's own, of a Llama's form."""
    spec = runner.spec  # type: ignore[attr-defined]
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": spec.max_context,
        "hidden_act": "silu",
    }


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """Holds the target's distributions of the tokens that are learned, within the draft vocabulary.

    Attributes:
        row: (b * t,) int64 place in `chances` of the token at each flat position; -1 where it is not learned.
        chances: (n, v) float32.
    """

    row: Tensor
    chances: Tensor

    def loss(self, states: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Sum up the cross-entropies in nats of the logits that states (m, d) and rows (v, d) of a head make for the
        tokens at flat positions (m,).
        """
        total: Tensor = _CrossEntropy.apply(states, rows, self.chances[self.row[tokens]])  # type: ignore[no-untyped-call]
        return total


class _CrossEntropy(torch.autograd.Function):
    """Its gradient is made with it, so that logits (m, v) are not kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, chances: Tensor) -> Tensor:
        logits = (states @ rows.T.to(states.dtype)).float()
        top = logits.logsumexp(-1, keepdim=True)
        total = top.sum() - torch.dot(chances.flatten(), logits.flatten())
        slope = logits.sub_(top).exp_().sub_(chances).to(states.dtype)
        down = slope.T @ states if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(slope @ rows.to(states.dtype), down)
        return total

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, rows = ctx.saved_tensors
        return above * states, None if rows is None else above * rows, None
