"""What a checkpoint recommends for generation: its end tokens and default sampling parameters.

In:  generation_config.json, with config.json and the tokenizer behind it. Out: GenerationDefaults.
Not here: what a user asked for (`config.SamplingParams` wins over all of this).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.config import SamplingParams
from paceline.errors import CheckpointError, ConfigError
from paceline.models.tokenizer import read_json

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p")
"""Keys that count only with `do_sample`, as in transformers."""

ALWAYS: Final = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
"""Keys that count in any case -> their names in SamplingParams."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Recommendations of a checkpoint.

    Attributes:
        eos_ids: end tokens, the first of them the main one; empty if the checkpoint names none.
        sampling: keyword arguments of SamplingParams, used where a user gives no sampling parameters at all (vLLM's
            `generation_config="auto"`).
    """

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
        """Read a checkpoint folder; files that are missing leave their part empty.

        End tokens come from generation_config.json, else from config.json (of its text part, where it has one), else they are the
        tokenizer's.

        Raises:
            CheckpointError: a file that cannot be read, or a value of the wrong type or out of range.
        """
        path = Path(folder)
        generation, config = read_json(path / "generation_config.json"), read_json(path / "config.json")
        text = config.get("text_config")
        candidates = [
            generation.get("eos_token_id"),
            config.get("eos_token_id"),
            text.get("eos_token_id") if isinstance(text, Mapping) else None,
            None if tokenizer is None else tokenizer.eos_id,
        ]
        declared = next((value for value in candidates if value is not None and value != []), None)
        return cls(_ids(declared, path), _sampling(generation, path))


def _ids(value: object, folder: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise CheckpointError(f"eos_token_id in {folder} must be a token id or a list of them, got {value!r}; correct the file")
    return tuple(dict.fromkeys(ids))


def _sampling(generation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The recommended keyword arguments, checked by building SamplingParams from them."""
    names = dict(ALWAYS) | ({name: name for name in SAMPLED} if generation.get("do_sample") is True else {})
    found = {ours: generation[theirs] for theirs, ours in names.items() if generation.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise CheckpointError(f"generation_config.json in {folder}: {error}; correct the file") from error
    return found
