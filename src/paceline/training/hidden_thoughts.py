"""Training of hidden thoughts (HCoT), in two fine-tunings: a thinker, and the model that answers with its thought.

Data are JSON lines with `prompt` (text) or `messages`, `thought` and `answer`. Behind each prompt stands a slot, a
special token of the tokenizer.

1. *Thinker* (`hcot_thinker`): an adapter and the slot's embedding learn the thought behind prompt and slot, and that
   the state at the slot is nearer to its own thought than to others of the batch: the symmetric cross-entropy of ten
   times the cosines, both sides less their mean over the batch. A thought is the mean of the states that the model
   without the adapter has on its text alone.
2. *Answers* (`hcot`): the thinker stays as it is. Another adapter, and a linear map of the thinker's state at the slot
   to what is read there, learn the answer alone. The state is taken in units of its mean and deviation over texts that
   are learned, since most of it is the same in all; the map begins as 0, which is the model without a thought.

The paper does not give weight and temperature of the contrast, what stands for a thought, or how the vector enters:
these are choices of this package.

Source: Expediting and Elevating Large Language Model Reasoning via Hidden Chain-of-Thought Decoding (arXiv:2409.08561).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.errors import CheckpointError, PromptError
from paceline.models.runners import THINKER, ThoughtSlot
from paceline.training.answers import TrainingText
from paceline.training.batches import PAD, Batch, Document, TargetView, packed
from paceline.training.draft_model import embedding_of, sliced
from paceline.training.lora import LoraConfig, LoraTrainer
from paceline.training.next_token import decoded, text_loss
from paceline.training.train_config import TrainConfig
from paceline.utils import need, text_of_file

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

SHARPNESS: Final = 10.0
"""Of the contrast: cosines count so many times."""

SEEN: Final = 64
"""Rows of the training texts from which mean and deviation of thoughts are taken."""


@dataclass(frozen=True, slots=True)
class Thought:
    """Holds a question, the thoughts behind it, and the answer."""

    prompt: str | Sequence[Mapping[str, Any]]
    thought: str
    answer: str


def thoughts_of(files: Sequence[Path]) -> list[Thought]:
    """Read questions with thoughts and answers.

    Raises:
        PromptError: a file that cannot be read, or a line that is none, with its number.
    """
    found = []
    for file in files:
        for number, line in enumerate(text_of_file(file).split("\n"), 1):  # texts may hold other separators of lines
            if line.strip():
                found.append(_thought(line, f"{file}, line {number}"))
    return found


def _thought(line: str, where: str) -> Thought:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is no JSON ({error}); give one question a line") from None
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
        raise PromptError(f"{where} must be an object with a text `prompt`, or `messages`")
    for name in ("thought", "answer"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise PromptError(f"{where} must have a text `{name}`")
    return Thought(prompt, row["thought"], row["answer"])


def slot_of(llm: LLM, text: str) -> int:
    """The token that stands for thoughts.

    Raises:
        ConfigError: a text that is no single token, or one that prompts begin or end with anyway.
    """
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    fine = len(ids) == 1 and ids[0] not in llm.tokenizer.encode("")
    need(fine, "slot", "be one special token of the tokenizer, which prompts do not begin or end with", text)
    return ids[0]


@documented
@dataclass(frozen=True, kw_only=True)
class ThinkerConfig(LoraConfig):
    """Says where a thought enters, and how much the contrast counts."""

    slot: str = option("<|endoftext|>", "Special token that stands for a thought, for hcot_thinker.", metavar="TEXT")
    contrast: float = option(1.0, "Weight of hcot_thinker's contrast.", low=0.0, high=1e3)


@documented
@dataclass(frozen=True, kw_only=True)
class ThoughtConfig(LoraConfig):
    """Says which thinker an answering model has."""

    thinker: str | None = option(None, "Folder of the thinker that hcot_thinker has made, for hcot.", metavar="FOLDER")


class _SlotTrainer(LoraTrainer):
    """Learns behind prompts with a slot at their end; a method says what, and what is read at the slot.

    Args:
        slot: token. options: of `LoraTrainer`.
    """

    def __init__(self, folder: Path, layers: int, rows: Tensor, *, slot: int, **options: Any) -> None:
        super().__init__(folder, layers, rows, **options)
        self.slot = slot

    @classmethod
    def check_data(cls, data: Sequence[Path]) -> None:
        """See `Trainer.check_data`."""
        if not thoughts_of(data):
            raise PromptError(f"{', '.join(map(str, data))} holds no questions; give one a line")

    @classmethod
    def _texts(cls, llm: LLM, config: TrainConfig, slot: int, name: str) -> list[TrainingText]:
        """Prompts with slots, and of what follows the part of that name."""
        found: dict[str, TrainingText] = {}
        for one in thoughts_of(config.data)[: config.most_prompts]:
            asked = one.prompt
            prompt = llm.tokenizer.encode(asked) if isinstance(asked, str) else llm.chat_ids(list(asked))
            said = llm.tokenizer.encode(getattr(one, name), add_special_tokens=False)
            if name == "answer" and (end := llm.tokenizer.eos_id) is not None:
                said = [*said, end]
            key = sha256(json.dumps([prompt, said]).encode()).hexdigest()
            found[key] = TrainingText(key, [*prompt, slot], said)
        return list(found.values())

    def slots(self, batch: Batch) -> Tensor:
        """(b, t) bool."""
        return (batch.tokens == self.slot) & (batch.documents != PAD)

    def read(self, batch: Batch, at_slots: Tensor) -> Tensor:
        """(b, t, d) embeddings, with others (..., d) at slots."""
        return torch.where(self.slots(batch)[..., None], at_slots, embedding_of(self.embed, batch))


class ThinkerTrainer(_SlotTrainer):
    """Trains a thinker, whose state at the slot is to stand for its thought.

    Args:
        weight: of the contrast. options: of `_SlotTrainer`.
    """

    name: ClassVar[str] = "hcot_thinker"
    config_class: ClassVar[type[TrainConfig]] = ThinkerConfig

    def __init__(self, folder: Path, layers: int, rows: Tensor, *, weight: float, **options: Any) -> None:
        super().__init__(folder, layers, rows, **options)
        self.weight = weight
        row = cast(Tensor, self.embed[0](torch.tensor([self.slot])))[0]
        self.embedding = nn.Parameter(row.detach().clone())

    @classmethod
    def texts(cls, llm: LLM, config: TrainConfig) -> list[TrainingText]:
        assert isinstance(config, ThinkerConfig)
        return cls._texts(llm, config, slot_of(llm, config.slot), "thought")

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[ThinkerTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, ThinkerConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        made = cls(
            llm.folder, info.num_layers, view.rows, weight=config.contrast, slot=slot_of(llm, config.slot),
            modules=config.target_modules, rank=config.rank, alpha=config.alpha,
        )  # fmt: skip
        return made, view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        named = "" if model is None else f"--model {model} "
        return f"paceline train hcot {named}--thinker {folder} --data FILE"

    def states(self, batch: Batch) -> Tensor:
        return decoded(self.model[0].to(batch.tokens.device), self.read(batch, self.embedding), batch)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        states = self.states(batch)
        return text_loss(states, self.rows, batch) + self.weight * self.contrast(states, batch)

    def contrast(self, states: Tensor, batch: Batch) -> Tensor:
        """The symmetric cross-entropy in nats of which thought of the batch belongs to which slot; 0 of one alone."""
        at = self.slots(batch).nonzero()
        if len(at) < 2:
            return states.sum() * 0.0
        thoughts = self._thoughts(batch)
        own = batch.wanted[at[:, 0]] & (batch.documents[at[:, 0]] == batch.documents[at[:, 0], at[:, 1]][:, None])
        means = torch.stack([thoughts[row][mask].mean(0) for row, mask in zip(at[:, 0].tolist(), own, strict=True)])
        sides = [F.normalize(one.float() - one.float().mean(0), dim=-1) for one in (states[at[:, 0], at[:, 1]], means)]
        cosines, wanted = SHARPNESS * (sides[0] @ sides[1].T), torch.arange(len(at), device=at.device)
        return (F.cross_entropy(cosines, wanted) + F.cross_entropy(cosines.T, wanted)) / 2

    @torch.no_grad()
    def _thoughts(self, batch: Batch) -> Tensor:
        """(b, t, d) states of thoughts that see nothing else, of the model as it was."""
        alone = replace(batch, documents=torch.where(batch.wanted, batch.documents, PAD))
        self.adapts = False
        try:
            return decoded(self.model[0].to(batch.tokens.device), embedding_of(self.embed, batch), alone)
        finally:
            self.adapts = True

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """An adapter in PEFT's format, and the slot."""
        ThoughtSlot(self.slot, self.embedding).write(folder)
        super().write(folder, llm, view, facts)


class ThoughtTrainer(_SlotTrainer):
    """Trains a model that answers with a thinker's thought.

    Args:
        thinker: folder of it. options: of `_SlotTrainer`.
    """

    name: ClassVar[str] = "hcot"
    config_class: ClassVar[type[TrainConfig]] = ThoughtConfig
    mean: Tensor
    deviation: Tensor

    def __init__(self, folder: Path, layers: int, rows: Tensor, *, thinker: Path, **options: Any) -> None:
        slot = ThoughtSlot.read(thinker, rows.shape[1], name=str(folder), whole=False)
        super().__init__(folder, layers, rows, slot=slot.token, **options)
        self.folder = thinker
        other, _ = sliced(folder, range(layers))
        _merge(other, thinker)
        self.thinker = (other.requires_grad_(False), slot.embedding)  # as `model`
        self.projection = nn.Parameter(torch.zeros(rows.shape[1], rows.shape[1]))
        self.register_buffer("mean", torch.zeros(rows.shape[1]), persistent=False)
        self.register_buffer("deviation", torch.ones(rows.shape[1]), persistent=False)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, ThoughtConfig)
        need(bool(config.thinker), "thinker", "be the folder of what hcot_thinker has made", config.thinker)

    @classmethod
    def texts(cls, llm: LLM, config: TrainConfig) -> list[TrainingText]:
        assert isinstance(config, ThoughtConfig)
        slot = ThoughtSlot.read(
            Path(config.thinker or ""), llm.runner.info.hidden_size, name=llm.runner.info.name, whole=False
        )
        return cls._texts(llm, config, slot.token, "answer")

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[ThoughtTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, ThoughtConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        made = cls(
            llm.folder, info.num_layers, view.rows, thinker=Path(config.thinker or ""), modules=config.target_modules,
            rank=config.rank, alpha=config.alpha,
        )  # fmt: skip
        return made, view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        named = "" if model is None else f"-m {model} "
        said = json.dumps({"method": cls.name, "path": str(folder)})
        return f"paceline generate {named}--skipping '{said}'"

    @torch.no_grad()
    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """Mean and deviation of thoughts."""
        self.to(self.rows.device)
        found = []
        for row in packed(documents, length)[:SEEN]:
            batch = view.batch([row], length).to(self.rows.device)
            found.append(self.thoughts(batch)[self.slots(batch)].float())
        every = torch.cat(found)
        self.mean.copy_(every.mean(0))
        self.deviation.copy_(every.std(0).nan_to_num(1.0).clamp(min=1e-4))

    @torch.no_grad()
    def thoughts(self, batch: Batch) -> Tensor:
        """(b, t, d) states of the thinker; those at slots are its thoughts."""
        model, embedding = self.thinker
        device = batch.tokens.device
        return decoded(model.to(device), self.read(batch, embedding.to(device)), batch)

    def states(self, batch: Batch) -> Tensor:
        return self.behind(self.thoughts(batch), batch)

    def behind(self, thoughts: Tensor, batch: Batch) -> Tensor:
        """(b, t, d) states of the model with these thoughts."""
        at_slots = (thoughts - self.mean) / self.deviation @ self.projection.T
        return decoded(self.model[0].to(batch.tokens.device), self.read(batch, at_slots), batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Both adapters in PEFT's format, and the slot with its map."""
        (folder / THINKER).mkdir(exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(self.folder / name, folder / THINKER / name)
        projection = self.projection / self.deviation
        ThoughtSlot(self.slot, self.thinker[1], projection, -projection @ self.mean).write(folder)
        super().write(folder, llm, view, facts)


@torch.no_grad()
def _merge(model: nn.Module, folder: Path) -> None:
    """Add an adapter that `LoraTrainer` wrote to the matrices of a model.

    Raises:
        CheckpointError: it is no such adapter.
    """
    try:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        factors, scale = load_file(folder / "adapter_model.safetensors"), about["lora_alpha"] / about["r"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} holds no adapter ({error}); `paceline train hcot_thinker` makes one") from None
    modules = dict(model.named_modules())
    for name, a in factors.items():
        if name.endswith("lora_A.weight"):
            module = modules[name.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")]
            cast(nn.Linear, module).weight.add_(scale * factors[name.replace("lora_A", "lora_B")] @ a)
