"""What a checkpoint recommends for generation: its end tokens and default sampling parameters.

What a user asks for (`config.SamplingParams`) wins over all of this.

End tokens are first those of transformers: a generation_config.json decides, even where it names none; only without
that file config.json does, for a composite model its text part where the outer part is silent. Behind them come the
tokenizer's own end token and the one with which the chat template ends an answer, at which vLLM, SGLang or llama.cpp
end too: a fine-tuned model often keeps the generation_config.json of its base. They count for all requests of a model,
and are said once where the files differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checkpoints.encoder_decoder_families import is_encoder_decoder, writes_times
from paceline.checkpoints.gguf_file import is_gguf, read_gguf
from paceline.checkpoints.gguf_tokenizer import gguf_end_ids
from paceline.checkpoints.marian_checkpoint import marian_config
from paceline.checkpoints.marian_file import marian_path
from paceline.checkpoints.tokenizer import read_json
from paceline.config import SamplingParams
from paceline.errors import CheckpointError, ConfigError
from paceline.utils import shortened

if TYPE_CHECKING:
    from paceline.checkpoints.tokenizer import Tokenizer

logger = logging.getLogger("paceline")

OF_SPEECH: Final = ("suppress_tokens", "begin_suppress_tokens")
TEXT_PARTS: Final = ("decoder", "generator", "text_config")
"""Where config.json of a composite model describes the part that writes text; the first that there is counts."""

SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p")
"""Keys that count only with `do_sample`, as in transformers."""

ALWAYS: Final = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
"""Keys that count in any case -> their names in SamplingParams."""

LEFT_OUT: Final[Mapping[str, object]] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
}
"""Keys that change what transformers generates and have no place in SamplingParams, with the values that do not."""

GGUF_SAMPLED: Final = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
GGUF_LEFT_OUT: Final[Mapping[str, object]] = {"xtc_probability": 0.0, "mirostat": 0, "penalty_repeat": 1.0}
"""The same for GGUF files, whose keys begin with "general.sampling."."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Recommendations of a checkpoint.

    Attributes:
        eos_ids: end tokens, the first of them the main one; empty if nothing names any (see the top of this file).
        sampling: keyword arguments of SamplingParams, used where a user gives no sampling parameters at all (vLLM's
            `generation_config="auto"`).
        decoder_start_ids: of an encoder-decoder model, the tokens that every text begins with; empty if nothing names
            any.
    """

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    decoder_start_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
        """Read a checkpoint folder; files that are missing leave their part empty.

        Raises:
            CheckpointError: a file that cannot be read, or a value of the wrong type or out of range.
        """
        path = Path(folder)
        if is_gguf(path):
            return cls(_with_words(gguf_end_ids(path), tokenizer, path, path), _gguf_sampling(path))
        file = path / "generation_config.json"
        generation = read_json(file)
        marian = marian_path(path)
        config = read_json(path / "config.json") if marian is None else marian_config(marian)
        declared = generation.get("eos_token_id") if file.is_file() else _of_config(config)
        _ids(config.get("eos_token_id"), path, least=-1)  # where it does not count, -1 for none is no damage
        ids, size = _ids(declared, path), config.get("vocab_size")
        if beyond := [token for token in ids if isinstance(size, int) and token >= size]:
            logger.warning(
                "end token %d of %s lies outside the vocabulary of %d tokens, so it is never generated; correct it",
                beyond[0],
                path,
                size,
            )
        if tokenizer is not None and isinstance(size, int) and tokenizer.vocab_size > size:
            logger.warning(
                "%s: its tokenizer has %d tokens, the model rows for %d; prompts with one of the others are rejected",
                path, tokenizer.vocab_size, size,
            )  # fmt: skip
        place = file if file.is_file() else path / "config.json" if ids else None
        starts = _decoder_start(config, generation, path) if is_encoder_decoder(config) else ()
        if writes_times(config):  # the transcriber keeps to these
            generation = {key: value for key, value in generation.items() if key not in OF_SPEECH}
        return cls(_with_words(ids, tokenizer, path, place), _sampling(generation, path), starts)


def _decoder_start(config: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """The start token, and the one that is forced behind it (a language, of multilingual models)."""
    starts: list[int] = []
    for key in ("decoder_start_token_id", "forced_bos_token_id"):
        value = generation.get(key) if generation.get(key) is not None else config.get(key)
        starts += _ids(value, path)[:1]
    return tuple(starts)


def _with_words(ids: tuple[int, ...], tokenizer: Tokenizer | None, path: Path, place: Path | None) -> tuple[int, ...]:
    """End tokens with those of the tokenizer and its chat template.

    Args:
        place: the file that names the others, for a log line; None says nothing.
    """
    if tokenizer is None:
        return ids
    words = {
        tokenizer.end_of_turn(): "the chat template's end of a turn",
        tokenizer.eos_id: "the tokenizer's end token",
    }
    more = {token: what for token, what in reversed(words.items()) if token is not None and token not in ids}
    if more and place is not None:
        said = " and ".join(f"{tokenizer.tokens().get(token)!r} ({token}, {what})" for token, what in more.items())
        logger.warning("%s: outputs end at %s too, which %s does not name as end token", path, said, place.name)
    return (*ids, *more)


def _of_config(config: Mapping[str, Any]) -> object:
    """The end tokens of a checkpoint without generation_config.json."""
    text = next((config[name] for name in TEXT_PARTS if config.get(name)), None)
    declared = [config.get("eos_token_id"), text.get("eos_token_id") if isinstance(text, Mapping) else None]
    return next((value for value in declared if value is not None and value != []), None)


def _ids(value: object, folder: Path, *, least: int = 0) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= least for token in ids):
        raise CheckpointError(
            f"eos_token_id in {folder} must be a token id or a list of them, got {shortened(value)}; correct the file"
        )
    return tuple(dict.fromkeys(ids))


def _sampling(generation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The recommended keyword arguments, checked by building SamplingParams from them."""
    names = dict(ALWAYS) | ({name: name for name in SAMPLED} if generation.get("do_sample") is True else {})
    return _checked(generation, names, LEFT_OUT, f"generation_config.json in {folder}")


def _gguf_sampling(path: Path) -> dict[str, Any]:
    """The same of a GGUF file."""
    prefix = "general.sampling."
    metadata = read_gguf(path).metadata
    declared = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return _checked(declared, GGUF_SAMPLED, GGUF_LEFT_OUT, str(path))


def _checked(
    declared: Mapping[str, Any], names: Mapping[str, str], left_out: Mapping[str, object], where: str
) -> dict[str, Any]:
    """Keyword arguments of SamplingParams by the names of others; what has no place there is said."""
    if more := [key for key, neutral in left_out.items() if declared.get(key) not in (None, neutral, [])]:
        logger.warning("%s recommends %s, which is not honoured", where, ", ".join(more))
    values = {ours: declared[theirs] for theirs, ours in names.items() if declared.get(theirs) is not None}
    try:
        SamplingParams(**values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}; correct the file") from error
    return values
