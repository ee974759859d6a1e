"""The ids that a Whisper checkpoint gives its special tokens, and the prompt that they make.

They are read from the checkpoint's own files, since they differ: English-only models have one token less before them
and know no languages, large-v3 has one more language.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), section 2.3, and its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints import read_json
from paceline.errors import CheckpointError, ConfigError
from paceline.utils import choice

TASKS: Final = ("transcribe", "translate")
CONTEXT: Final = 448
"""Positions of the decoder; half of them at most are sampled in one window."""

DEFAULT_INITIAL: Final = 50
"""Steps of 0.02 s after which the first segment may begin, where a checkpoint does not say: one second."""

MULTILINGUAL: Final = "take a multilingual one"
BLANK: Final = "Ġ"
"""A space, as byte-level vocabularies spell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """Special ids of one checkpoint.

    Attributes:
        end: ends a text; text tokens are those below it.
        start: begins a transcript.
        start_of_previous: begins the text of windows before this one.
        no_speech: its probability after `start` is that of silence.
        no_timestamps: asks for text without times. The token after it is the time 0.00, the next one 0.02 s, and so on.
        tasks: "transcribe" and "translate" -> id; empty for English-only models.
        languages: code (en, de, ...) -> id; empty for English-only models.
        suppressed: ids that are never sampled: signs of what is not spoken, and special ids.
        suppressed_at_begin: ids that cannot come first: a blank, and `end`.
        max_initial: the latest time, in steps of 0.02 s, at which the first segment may begin.
        alignment_heads: (layer, head) of the decoder's heads of cross-attention that follow the words in time; empty
            where the checkpoint names none.
        context: positions of the decoder.
    """

    end: int
    start: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_at_begin: tuple[int, ...]
    max_initial: int = DEFAULT_INITIAL
    alignment_heads: tuple[tuple[int, int], ...] = ()
    context: int = CONTEXT

    @property
    def first_timestamp(self) -> int:
        """Id of the time 0.00; all ids from here on are times."""
        return self.no_timestamps + 1

    @property
    def multilingual(self) -> bool:
        """It knows languages and tasks."""
        return bool(self.languages)

    @property
    def max_sampled(self) -> int:
        """Tokens that are sampled in one window at most."""
        return self.context // 2

    def prompt(
        self,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
        previous: Sequence[int] = (),
    ) -> list[int]:
        """The tokens that stand before the first sampled one.

        Args:
            language: its code or English name; a multilingual model needs one (`language_probabilities` finds it).
            task: "transcribe", or "translate" to English.
            timestamps: times are sampled among the text.
            previous: text and time tokens of windows before, of which the last ones that fit are taken.
        Raises:
            ConfigError: a language or task that the model does not know, or no language where it needs one.
        """
        begin = [self.start, *self._asked(language, task)]
        if not timestamps:
            begin.append(self.no_timestamps)
        kept = previous[-(self.context // 2 - 1) :]
        return [self.start_of_previous, *kept, *begin] if kept else begin

    def _asked(self, language: str | None, task: str) -> tuple[int, ...]:
        choice("task", task, TASKS)
        if not self.multilingual:
            if language is not None and language_code(language) != "en":
                raise ConfigError(f"this model only transcribes English, got language {language!r}; {MULTILINGUAL}")
            if task != "transcribe":
                raise ConfigError(f"this model only transcribes English, got task {task!r}; {MULTILINGUAL}")
            return ()
        if language is None:
            raise ConfigError(f"language must be one of {', '.join(sorted(self.languages))}, got None")
        code = language_code(language)
        choice("language", code, sorted(self.languages))
        return self.languages[code], self.tasks[task]

    @classmethod
    def load(cls, folder: Path) -> WhisperTokens:
        """Read from `tokenizer.json`, `generation_config.json` and `config.json` of a Hugging Face folder.

        Raises:
            CheckpointError: a file is missing or lacks an id.
        """
        settings = read_json(folder / "config.json")
        given = read_json(folder / "generation_config.json")
        settings |= {key: value for key, value in given.items() if value is not None}
        return _tokens_of(settings, _ids_of(folder), str(folder))


def language_code(language: str) -> str:
    """The code of a language that is given by its code or English name, in any case; unknown names come back."""
    name = language.lower()
    if len(name) <= 3:
        return name
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return str(TO_LANGUAGE_CODE.get(name, name))


def language_name(code: str) -> str:
    """The English name of a language, "english" for "en"; unknown codes come back."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return str(LANGUAGES.get(code, code))


def _ids_of(folder: Path) -> Mapping[str, int]:
    """Token -> id of a `tokenizer.json`."""
    read = read_json(folder / "tokenizer.json")
    ids: dict[str, int] = dict(read.get("model", {}).get("vocab", {}))
    return ids | {token["content"]: int(token["id"]) for token in read.get("added_tokens", ())}


def _tokens_of(settings: Mapping[str, Any], ids: Mapping[str, int], folder: str) -> WhisperTokens:
    def special(name: str) -> int:
        if f"<|{name}|>" not in ids:
            raise CheckpointError(
                f"{folder} must hold a Whisper model with a tokenizer.json, which lacks <|{name}|>; download it again"
            )
        return ids[f"<|{name}|>"]

    end, start, no_timestamps = special("endoftext"), special("startoftranscript"), special("notimestamps")
    tasks = {task: special(task) for task in TASKS}
    no_speech = ids.get("<|nospeech|>", ids.get("<|nocaptions|>", no_timestamps - 1))
    special_ids = {start, *tasks.values(), special("startoflm"), special("startofprev"), no_speech}
    multilingual = settings.get("is_multilingual", settings.get("vocab_size", 0) >= 51865)
    languages = {
        token[2:-2]: number
        for token, number in ids.items()
        if start < number < min(tasks.values()) and token.startswith("<|")
    }
    at_begin = settings.get("begin_suppress_tokens")
    initial = settings.get("max_initial_timestamp_index")
    return WhisperTokens(
        end=end,
        start=start,
        start_of_previous=special("startofprev"),
        no_speech=no_speech,
        no_timestamps=no_timestamps,
        tasks=tasks if multilingual else {},
        languages=languages if multilingual else {},
        suppressed=tuple(sorted({*(settings.get("suppress_tokens") or ()), *special_ids})),
        suppressed_at_begin=tuple(sorted((ids[BLANK], end) if at_begin is None else at_begin)),
        max_initial=DEFAULT_INITIAL if initial is None else int(initial),
        alignment_heads=tuple((layer, head) for layer, head in settings.get("alignment_heads") or ()),
        context=int(settings.get("max_target_positions", CONTEXT)),
    )
