"""Encoders of transformers beside the served model: one that embeds texts, and one that judges pairs of them.

Each works on the processor, on a thread of its own, so that decoding goes on. Weights are read from safetensors files
alone, and no code of a checkpoint is run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from paceline.checkpoints import check_unicode, read_json, resolve_encoder
from paceline.engine import check_length
from paceline.errors import CheckpointError, PromptError, UnsupportedModelError
from paceline.serving.places import Places
from paceline.utils import one_line, shortened

MOST_PADDED: Final = 4096
"""So many tokens, padding included, are encoded in a pass; a text that has more is alone in one."""

PART: Final = 2**17
"""So many characters, or token ids, are given to a tokenizer before others have a turn; a text is never divided."""

Json = dict[str, Any]
Result = TypeVar("Result")
Text = str | list[int]


def _cls(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[:, 0]


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states)), mask.sum(1).long() - 1]


def _max(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _mean_by_root(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).sqrt()


def _weighted_mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask * torch.arange(1, mask.shape[1] + 1)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


POOLS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""How states (b, t, d) become (b, d), with a mask (b, t) of 1.0 for tokens and 0.0 for padding behind them."""

SWITCHES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of sentence-transformers' 1_Pooling/config.json, in the order in which several are joined."""

ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Sigmoid": torch.sigmoid,
    "Identity": torch.clone,
}
"""What becomes of a cross-encoder's logit, by the names that sentence-transformers writes into its config.json."""


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What sentence-transformers does with the states of a checkpoint.

    Attributes:
        modes: of `POOLS`; of several the results are joined.
        normalize: to length 1, at the end.
    """

    modes: tuple[str, ...]
    normalize: bool

    @classmethod
    def read(cls, folder: Path) -> PoolingSpec:
        """Read `modules.json` and what it names; the mean of all states where there is no such file.

        Raises:
            UnsupportedModelError: a module or a pooling that is not known here.
            CheckpointError: a file that cannot be read.
        """
        modes: tuple[str, ...] = ("mean",)
        normalize = False
        for module in _modules(folder):
            kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
            if kind == "Pooling":
                modes = _modes(folder / path / "config.json")
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise UnsupportedModelError(
                    f"{folder / 'modules.json'} has a module {kind!r}, which is not supported; Transformer, Pooling "
                    "and Normalize are"
                )
        return cls(modes, normalize)

    def pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(b, d * modes) of states (b, t, d) and a mask (b, t)."""
        return torch.cat([POOLS[mode](states, mask) for mode in self.modes], -1)


def _modules(folder: Path) -> list[Json]:
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} must hold a list of JSON objects; download the checkpoint again")
    return modules


def _modes(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which modules.json names; download the checkpoint again")
    config = read_json(path)
    named = config.get("pooling_mode")  # newer files have one key for all
    modes = [named] if isinstance(named, str) else list(named or ())
    modes = modes or [mode for key, mode in SWITCHES.items() if config.get(key)]
    if not modes or (unknown := [mode for mode in modes if mode not in POOLS]):
        wanted = unknown[0] if modes else "none"
        raise UnsupportedModelError(f"{path} wants the pooling {wanted!r}; known: {', '.join(POOLS)}")
    return tuple(modes)


class EncoderThread:
    """A model of transformers on a thread of its own, with the tokenizer that belongs to it.

    Args:
        name: as the operator gave it: a folder or a hub id. kind: class of transformers that loads the model.
    Attributes:
        most_tokens: that a text may have, special tokens included.
    Raises:
        CheckpointError: it cannot be loaded.
    """

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.folder = name, resolve_encoder(name)
        if not self.folder.is_dir():
            raise UnsupportedModelError(f"{name} is a GGUF file; give the folder of an encoder with safetensors")
        self.model = _loaded(self.folder, kind)
        self.tokenizer = _tokenizer(self.folder)
        own = read_json(self.folder / "sentence_bert_config.json")
        declared = [own.get("max_seq_length"), self.tokenizer.model_max_length, _positions(self.model.config)]
        self.most_tokens = min(length for length in declared if length)
        self.vocab_size: int = self.model.config.vocab_size
        self._lower = bool(own.get("do_lower_case"))
        self._thread, self._places = ThreadPoolExecutor(1, f"encoder-{self.folder.name}"), Places(1)

    async def ask(self, work: Callable[[], Result]) -> Result:
        """Return what the work gives on this thread; keys take turns."""
        async with self._places.place():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def tokens(
        self, texts: Sequence[Text] | Sequence[tuple[str, str]], kept: int | None, *, special: bool = True
    ) -> list[Json]:
        """The fields that the tokenizer makes of texts, of token ids or of pairs of texts, not padded.

        Args:
            kept: tokens of each, beyond which it is cut as the tokenizer cuts it; None cuts nothing.
            special: texts get the special tokens that the tokenizer adds.
        Raises:
            PromptError: a text that is empty or too long, or ids outside the vocabulary.
        """
        fields: list[Json] = []
        for part in _parts(texts):
            fields += await self.ask(partial(self._all_fields, part, kept, special=special))
        return fields

    def close(self) -> None:
        """End the thread behind what it does at present."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _all_fields(self, texts: Sequence[Text | tuple[str, str]], kept: int | None, *, special: bool) -> list[Json]:
        found = []
        for text in texts:
            found.append(self._fields(text, kept, special=special))
            check_length(len(found[-1]["input_ids"]), self.most_tokens)
        return found

    def _fields(self, text: Text | tuple[str, str], kept: int | None, *, special: bool) -> Json:
        if isinstance(text, list):
            for token in text:
                if not 0 <= token < self.vocab_size:
                    raise PromptError(f"token ids must be integers in 0..{self.vocab_size - 1}, got {shortened(token)}")
            fields: Json = {"input_ids": text[:kept]}
        else:
            for part in [text] if isinstance(text, str) else text:
                check_unicode(part)
            parts = [part.lower() if self._lower else part for part in ([text] if isinstance(text, str) else text)]
            cut = {} if kept is None else {"truncation": "longest_first", "max_length": kept}
            more = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
            fields = dict(self.tokenizer(*parts, **more, **cut))
        if not fields["input_ids"]:
            raise PromptError("the text is empty; give at least one token")
        return fields

    def padded(self, fields: Sequence[Json]) -> dict[str, torch.Tensor]:
        """(b, t) tensors of a batch."""
        batch: dict[str, torch.Tensor] = dict(self.tokenizer.pad(list(fields), return_tensors="pt"))
        return batch


def _loaded(folder: Path, kind: str) -> Any:
    """The model, in float32.

    Raises:
        CheckpointError: what transformers says; weights that are missing and would be random numbers.
    """
    import transformers

    try:
        model, info = getattr(transformers, kind).from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, dtype=torch.float32,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{folder} cannot be loaded as an encoder ({one_line(error)})") from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))  # which nothing reads
    if missing:
        raise CheckpointError(f"{folder} lacks weights of {kind}, among them {missing[0]}; give another checkpoint")
    model.config.use_cache = False
    return model.eval()


def _tokenizer(folder: Path) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"the tokenizer of {folder} cannot be loaded ({one_line(error)})") from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _positions(config: Any) -> int | None:
    """Tokens for which a model has positions; None where it does not say. RoBERTa's begin behind the padding's."""
    most: int | None = getattr(config, "max_position_embeddings", None)
    offset = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    return None if most is None else most - offset


def _parts(texts: Sequence[Text | tuple[str, str]]) -> Iterator[list[Text | tuple[str, str]]]:
    """Yield texts, those together that take the tokenizer little time."""
    part: list[Text | tuple[str, str]] = []
    room = PART
    for text in texts:
        part.append(text)
        room -= len(text[0]) + len(text[1]) if isinstance(text, tuple) else len(text)
        if room <= 0:
            yield part
            part, room = [], PART
    if part:
        yield part


def _batches(fields: Sequence[Json]) -> Iterator[list[int]]:
    """Yield numbers of texts that are encoded together, those of like length."""
    lengths = [len(one["input_ids"]) for one in fields]
    batch: list[int] = []
    for number in sorted(range(len(fields)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > MOST_PADDED:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class Encoder:
    """Embeds texts by a checkpoint, pooled as its sentence-transformers files say.

    Raises:
        CheckpointError: it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self.thread = EncoderThread(name, "AutoModel")
        self.pooling = PoolingSpec.read(self.thread.folder)
        self.size: int = self.thread.model.config.hidden_size * len(self.pooling.modes)

    async def pooled(self, fields: Sequence[Json]) -> torch.Tensor:
        """(n, size) float32 pooled states of texts, not normalised."""
        found = torch.empty(len(fields), self.size)
        for numbers in _batches(fields):
            batch = [fields[number] for number in numbers]
            found[numbers] = await self.thread.ask(partial(self._pooled, batch))
        return found

    @torch.inference_mode()
    def _pooled(self, fields: Sequence[Json]) -> torch.Tensor:
        batch = self.thread.padded(fields)
        states = self.thread.model(**batch).last_hidden_state
        return self.pooling.pooled(states, batch["attention_mask"].to(states.dtype))


class CrossEncoder:
    """Judges how well the second text of a pair answers the first.

    Raises:
        CheckpointError: it cannot be loaded, or has other labels than one.
    """

    def __init__(self, name: str) -> None:
        self.thread = EncoderThread(name, "AutoModelForSequenceClassification")
        config = self.thread.model.config
        if config.num_labels != 1:
            raise UnsupportedModelError(f"{name} has {config.num_labels} labels; a cross-encoder that ranks has one")
        own = getattr(config, "sentence_transformers", None) or {}
        named = own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
        kind = str(named).rpartition(".")[2]
        if kind not in ACTIVATIONS:
            raise UnsupportedModelError(f"{name} wants the activation {named!r}; known: {', '.join(ACTIVATIONS)}")
        self._activation = ACTIVATIONS[kind]

    async def scores(self, fields: Sequence[Json]) -> list[float]:
        """The score of each pair, higher where it suits better."""
        found = [0.0] * len(fields)
        for numbers in _batches(fields):
            batch = [fields[number] for number in numbers]
            scores = await self.thread.ask(partial(self._scores, batch))
            for number, score in zip(numbers, scores, strict=True):
                found[number] = score
        return found

    @torch.inference_mode()
    def _scores(self, fields: Sequence[Json]) -> list[float]:
        logits = self.thread.model(**self.thread.padded(fields)).logits[:, 0]
        scores: list[float] = self._activation(logits).tolist()
        return scores
