"""Training of a draft model: some of the target's own layers, or a small Llama of any shape.

FastDraft's recipe has stages, each with texts, steps and a learning rate of its own, of which all but the last may be
left out: pre-training on texts, continued training on others, such as code, and alignment on texts that the target
wrote. The first two learn the texts' own tokens. The last learns the target's distribution over the draft vocabulary,
or with `token_distillation` False the tokens alone (sequence-level distillation).

The layers keep the target's embedding and head as they are. The Llama's are linear maps of the target's, which are
learned: so it knows tokens that training never met. It begins with the directions in which the rows of the target's
head differ most. With `own_embedding` it learns each token's row instead, which begins as the same map's, for embedding
and head in one: more than the maps can say, where there are texts enough to learn it from.

What is written is a checkpoint of the target's family or a Llama, which any engine reads, and the draft vocabulary
beside it.

Sources: FastDraft: how to train your draft (arXiv:2411.11055); Hinton et al. 2015 (arXiv:1503.02531).
"""

from __future__ import annotations

import json
import re
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import QUANTIZATION_KEYS, open_checkpoint, read_config
from paceline.config import documented, option
from paceline.errors import CapabilityError
from paceline.models.heads import target_rows, write_folder
from paceline.training.answers import texts_of
from paceline.training.batches import Batch, TargetView
from paceline.training.heads import Stage
from paceline.training.next_token import NextTokenTrainer, decoded, text_loss
from paceline.training.train_config import TrainConfig
from paceline.utils import integer, need, replacing

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

VOCABULARY: Final = "draft_vocab.json"
"""In the draft's folder: its vocabulary, for `draft_vocab_file`."""

COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                 "generation_config.json")  # fmt: skip

LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")

HEAD_DIM: Final = 64
"""Of a small Llama's attention."""

Tensors = dict[str, Tensor]


def check_layers(name: str, value: Sequence[int]) -> None:
    """Reject what are no layers in ascending order; ConfigError."""
    for layer in value:
        integer(name, layer, 0)
    ascending = len(value) > 0 and list(value) == sorted(set(value))
    need(ascending, name, "be one number or more, ascending", value)


def _check_files(name: str, value: Sequence[Path]) -> None:
    need(bool(value), name, "name at least one file", value)


@documented
@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(TrainConfig):
    """Says which layers a draft model takes of the target, or how large a Llama of its own is."""

    layers: tuple[int, ...] | None = option(
        None, "Of the model, for draft_model: 0,4,9; a fifth of them by default.", check=check_layers
    )
    hidden_size: int | None = option(
        None, "Of a small Llama, for draft_model without --layers; 64, 128, ..., or what --num-heads divides.", low=8
    )
    num_layers: int = option(1, "Of that Llama.", low=1, high=64)
    num_heads: int | None = option(None, "Of its attention; heads of 64 by default.", low=1)
    num_kv_heads: int | None = option(None, "Of keys and values; as many as heads by default.", low=1)
    intermediate_size: int | None = option(None, "Of its feed-forwards; 8/3 of its width by default.", low=8)
    own_embedding: bool = option(
        False, "It learns an embedding of its own, which is its head too, in place of maps of the model's."
    )
    pretrain_data: Sequence[Path] | None = option(
        None, "Texts on which it is pre-trained, before all else; repeatable.", check=_check_files
    )
    pretrain_steps: int = option(1000, "Of that.", low=1)
    pretrain_learning_rate: float | None = option(
        None, "Of that; the method's by default.", low=0.0, high=1.0, rule="be above 0 and at most 1", open_low=True
    )
    continue_data: Sequence[Path] | None = option(
        None, "Texts of another domain, such as code, on which training is continued then; repeatable.",
        check=_check_files,
    )  # fmt: skip
    continue_steps: int = option(1000, "Of that.", low=1)
    continue_learning_rate: float | None = option(
        None, "Of that; the method's by default.", low=0.0, high=1.0, rule="be above 0 and at most 1", open_low=True
    )
    token_distillation: bool = option(
        True, "Learn the model's distributions of its answers' tokens; with --no-token-distillation these tokens alone."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        clash = self.hidden_size is not None and self.layers is not None
        need(not clash, "hidden_size", "be left out where layers are given", self.hidden_size)
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "own_embedding"):
            value = getattr(self, name)
            need(self.hidden_size is not None or not value, name, "come with hidden_size", value)
        if self.hidden_size is not None:
            self._check_heads(self.hidden_size)

    def _check_heads(self, hidden: int) -> None:
        if self.num_heads is None:
            need(hidden % HEAD_DIM == 0, "hidden_size", f"be a multiple of {HEAD_DIM} without num_heads", hidden)
        heads = self.num_heads or hidden // HEAD_DIM
        fine = hidden % heads == 0 and hidden // heads % 2 == 0
        need(fine, "num_heads", f"divide the width {hidden} into heads of an even size", heads)
        need(heads % (self.num_kv_heads or heads) == 0, "num_kv_heads", f"divide {heads} heads", self.num_kv_heads)

    def files(self) -> list[Path]:
        return [*super().files(), *(self.pretrain_data or ()), *(self.continue_data or ())]

    def shape(self) -> dict[str, int]:
        """Of the small Llama, as config.json names it."""
        hidden = self.hidden_size or 0
        heads = self.num_heads or hidden // HEAD_DIM
        return {
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size or -(-8 * hidden // (3 * HEAD_DIM)) * HEAD_DIM,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_kv_heads or heads,
            "head_dim": hidden // heads,
        }


class DraftModelTrainer(NextTokenTrainer):
    """Trains a decoder of transformers, `model`, whose input is `embedded`."""

    name: ClassVar[str] = "draft_model"
    config_class: ClassVar[type[TrainConfig]] = DraftModelConfig
    rate: ClassVar[float] = 3e-4
    model: nn.Module
    distils: bool = True

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, DraftModelConfig)
        most, count, layers = target.hidden_size, target.num_layers, config.layers
        need((config.hidden_size or 0) <= most, "hidden_size", f"be at most {most}, the model's", config.hidden_size)
        need(max(layers or (0,)) < count, "layers", f"be below {count}, the model's layers", layers)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[DraftModelTrainer, TargetView]:
        assert isinstance(config, DraftModelConfig)
        view = TargetView(llm.runner, (), vocabulary, keep_bytes=config.feature_cache_bytes)
        info = llm.runner.info
        if config.hidden_size is not None:
            kind = OwnLlamaTrainer if config.own_embedding else SmallLlamaTrainer
            made: DraftModelTrainer = kind(info, config.shape(), view, config.depths)
        else:
            layers = evenly(info.num_layers) if config.layers is None else config.layers
            made = SlicedTrainer(llm.folder, layers, view.rows, config.depths)
        made.distils = config.token_distillation
        return made, view

    @classmethod
    def stages(cls, llm: LLM, config: TrainConfig) -> list[Stage]:
        """See `Trainer.stages`: pre-training and continued training, where there are texts for them."""
        assert isinstance(config, DraftModelConfig)
        given = (
            ("pre-training", config.pretrain_data, config.pretrain_steps, config.pretrain_learning_rate),
            ("continued training", config.continue_data, config.continue_steps, config.continue_learning_rate),
        )
        return [
            Stage(
                name,
                texts_of(llm, files, most=config.most_prompts),
                replace(config.fitting, steps=steps, learning_rate=rate),
            )
            for name, files, steps, rate in given
            if files
        ]

    def relative_size(self, llm: LLM) -> float:
        """See `Trainer.relative_size`: its layers, and the rows of the head that it drafts with."""
        info = llm.runner.info
        layers = sum(parameter.numel() for parameter in self.model.parameters())
        return float((layers + self.head_rows().numel()) * info.dtype.itemsize / info.weight_bytes)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        if self.distils and batch.final.shape[-1]:
            return super().loss(batch, generator)
        return text_loss(self.states(batch), self.head_rows(), batch)

    @abstractmethod
    def embedded(self, batch: Batch) -> Tensor:
        """(b, t, d) what the first layer reads."""

    @abstractmethod
    def checkpoint(self, llm: LLM) -> tuple[dict[str, Any], Tensors]:
        """Its config.json and weights, as transformers names them."""

    def states(self, batch: Batch) -> Tensor:
        return decoded(self.model, self.embedded(batch), batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, with the target's tokenizer and the draft vocabulary."""
        config, tensors = self.checkpoint(llm)
        with replacing(folder / VOCABULARY) as fresh:
            fresh.write_text(json.dumps(view.vocabulary.tolist()), encoding="utf-8")
        write_checkpoint(folder, llm, config | {"paceline_draft": dict(facts)}, tensors)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        trimmed = {"draft_vocab_size": len(self.rows), "draft_vocab_file": str(folder / VOCABULARY)}
        return {"method": "draft_model", "model": str(folder), **trimmed}


class SlicedTrainer(DraftModelTrainer):
    """Trains a draft that consists of some of the target's layers.

    Args:
        folder: of the target's checkpoint. layers: of it, ascending. rows, depths: as above.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    def __init__(self, folder: Path, layers: Sequence[int], rows: Tensor, depths: int | None = None) -> None:
        super().__init__(rows, depths)
        self.made_of = tuple(layers)
        self.model, self.embed = sliced(folder, layers)

    def embedded(self, batch: Batch) -> Tensor:
        return embedding_of(self.embed, batch)

    def checkpoint(self, llm: LLM) -> tuple[dict[str, Any], Tensors]:
        config = shortened(read_config(llm.folder), self.made_of)
        return config | {"paceline_layers": list(self.made_of)}, with_layers(llm.folder, self.model)


class SmallLlamaTrainer(DraftModelTrainer):
    """Trains a small Llama on the target's vocabulary.

    Args:
        target: whose vocabulary and context it has. shape: as `DraftModelConfig.shape`, no wider than the target.
        view: of the target. depths: as above.
    """

    rate: ClassVar[float] = 2e-3
    tied: ClassVar[bool] = False

    def __init__(
        self, target: ModelInfo, shape: Mapping[str, int], view: TargetView, depths: int | None = None
    ) -> None:
        from transformers import LlamaConfig, LlamaModel

        rows = view.rows
        super().__init__(rows, depths)
        self.shape: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            **shape,
            "max_position_embeddings": target.max_context,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        }
        model = LlamaModel(LlamaConfig(**self.shape))
        model.set_input_embeddings(nn.Identity())
        self.model = model
        self._begin(view, torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -shape["hidden_size"] :].contiguous())

    def _begin(self, view: TargetView, basis: Tensor) -> None:
        """Embedding and head; `basis` (target's hidden, hidden) the directions in which the head's rows differ most."""
        self.reads, self.says = nn.Parameter(basis.clone()), nn.Parameter(basis.clone())

    def embedded(self, batch: Batch) -> Tensor:
        return batch.embedded @ self.reads

    def head_rows(self) -> Tensor:
        return self.rows @ self.says

    @torch.no_grad()
    def checkpoint(self, llm: LLM) -> tuple[dict[str, Any], Tensors]:
        tensors: Tensors = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        tensors |= self.ends(llm)
        stored = read_config(llm.folder)
        ends = {key: value for key, value in stored.items() if key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **self.shape, **ends}, tensors

    def ends(self, llm: LLM) -> Tensors:
        """Embedding and head, of all tokens."""
        info = llm.runner.info
        every = range(info.vocab_size)
        embedding = cast(Any, llm.runner).embed(every).float()
        rows = target_rows(cast(Any, llm.runner), info, torch.tensor(every)).float()
        embedded = embedding @ self.reads.to(embedding.device)
        return {"model.embed_tokens.weight": embedded, "lm_head.weight": rows @ self.says.to(rows.device)}


class OwnLlamaTrainer(SmallLlamaTrainer):
    """Trains a small Llama with an embedding of its own, which is its head too.

    Args: as of `SmallLlamaTrainer`.
    """

    tied: ClassVar[bool] = True
    vocabulary: Tensor

    def _begin(self, view: TargetView, basis: Tensor) -> None:
        info = view.runner.info
        rows = target_rows(cast(Any, view.runner), info, torch.arange(info.vocab_size)).float()
        self.embedding = nn.Parameter(rows @ basis)
        self.register_buffer("vocabulary", view.vocabulary.to(rows.device), persistent=False)

    def embedded(self, batch: Batch) -> Tensor:
        return nn.functional.embedding(batch.tokens, self.embedding)

    def head_rows(self) -> Tensor:
        return self.embedding[self.vocabulary]

    def ends(self, llm: LLM) -> Tensors:
        return {"model.embed_tokens.weight": self.embedding}


def evenly(count: int) -> tuple[int, ...]:
    """A fifth of so many layers, the first and the last among them."""
    wanted = max(2, round(count / 5)) if count > 1 else 1
    return tuple(round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted))


def layers_in(config: Mapping[str, Any]) -> int:
    """How many layers a checkpoint has, by its config.json.

    Raises:
        CapabilityError: it does not say, as where a model is a part of another one.
    """
    if (count := config.get("num_hidden_layers")) is None:
        raise CapabilityError(
            f"the config.json of a {config.get('model_type')!r} model has no num_hidden_layers at its top, so that its "
            "layers cannot be trained; train a head instead"
        )
    return int(count)


def shortened(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Make a config.json for a model that has these layers alone.

    Raises:
        CapabilityError: as `layers_in`.
    """
    count = layers_in(config)
    lists = {
        key: [value[layer] for layer in layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count and "layer" in key
    }
    floats = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    return {**floats, **lists, "num_hidden_layers": len(layers)}


def sliced(folder: Path, layers: Sequence[int]) -> tuple[nn.Module, tuple[nn.Module]]:
    """Layers and final norm of a checkpoint in float32, and, where no module sees it, the embedding.

    Raises:
        CapabilityError: they are not those of a causal model of Hugging Face.
    """
    from transformers import AutoConfig, AutoModel

    config = read_config(folder)
    stored = open_checkpoint(folder, config)
    auto_config = AutoConfig.for_model(**shortened(config, layers))
    model = AutoModel.from_config(auto_config, dtype=torch.float32)
    place = {layer: number for number, layer in enumerate(layers)}
    weights = {}
    for name in stored.entries:
        part = LAYER.fullmatch(name)
        if part is None:
            weights[name.removeprefix("model.")] = stored.tensor(name)
        elif int(part[1]) in place:
            weights[f"layers.{place[int(part[1])]}.{part[2]}"] = stored.tensor(name)
    absent = model.load_state_dict(weights, strict=False).missing_keys
    if absent:
        raise CapabilityError(
            f"{folder} holds no {absent[0]}, so that its layers cannot be trained; train a head instead"
        )
    embed = model.get_input_embeddings().requires_grad_(False)
    model.set_input_embeddings(nn.Identity())
    return model, (embed,)


@torch.no_grad()
def embedding_of(embed: tuple[nn.Module], batch: Batch) -> Tensor:
    """(b, t, d) embeddings of a batch's tokens, of what `sliced` gives."""
    return cast(Tensor, embed[0].to(batch.tokens.device)(batch.tokens))


def with_layers(folder: Path, model: nn.Module) -> Tensors:
    """The weights of a checkpoint, with the layers and the final norm of a model in place of its own."""
    stored = open_checkpoint(folder, read_config(folder))
    kept = {name: stored.tensor(name) for name in stored.entries if not LAYER.fullmatch(name)}
    return kept | {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def write_checkpoint(folder: Path, llm: LLM, config: Mapping[str, Any], tensors: Tensors) -> None:
    """A checkpoint in the target's dtype, with the target's tokenizer; its config.json comes last."""
    write_beside(folder, llm.folder, config, {name: one.to(llm.runner.info.dtype) for name, one in tensors.items()})


def write_beside(folder: Path, source: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """A checkpoint with the tokenizer of another one; its config.json comes last."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    write_folder(folder, config, tensors)
