"""A Whisper of few words: ids 0..9 are text, then come the special tokens and 1,501 times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.speech.whisper_tokens import WhisperTokens

SPECIAL = (
    *("endoftext", "startoftranscript", "en", "de", "haw", "translate", "transcribe"),
    *("startoflm", "startofprev", "nospeech", "notimestamps"),
)
END, START, EN, DE, HAW, TRANSLATE, TRANSCRIBE, START_OF_LM, PREVIOUS, NO_SPEECH, NO_TIMES = range(10, 21)
T0 = 21
VOCAB = T0 + 1501
A, B = 3, 4

TOKENS = WhisperTokens(
    end=END,
    start=START,
    start_of_previous=PREVIOUS,
    no_speech=NO_SPEECH,
    no_timestamps=NO_TIMES,
    tasks={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    languages={"en": EN, "de": DE, "haw": HAW},
    suppressed=(1, START, TRANSLATE, TRANSCRIBE, START_OF_LM, PREVIOUS, NO_SPEECH),
    suppressed_at_begin=(0, END),
)


def time(step: int) -> int:
    """The token of a time, in steps of 0.02 s."""
    return T0 + step


def words(tokens: Sequence[int]) -> str:
    """As a tokenizer decodes text tokens."""
    return "".join(f" w{token}" for token in tokens)


def write(folder: Path, *, multilingual: bool = True, lists: bool = True) -> Path:
    """The files of a checkpoint that tell its ids.

    Args:
        lists: its generation config has the lists of ids.
    """
    vocab = {"Ġ" if token == 0 else f"w{token}": token for token in range(10)}
    added = [{"id": END + place, "content": f"<|{name}|>"} for place, name in enumerate(SPECIAL)]
    times = [{"id": time(step), "content": f"<|{step * 0.02:.2f}|>"} for step in range(1501)]
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [*added, *times]}
    generation = {
        "is_multilingual": multilingual,
        "suppress_tokens": [1] if lists else None,
        "begin_suppress_tokens": [0, END] if lists else None,
        "max_initial_timestamp_index": 25 if lists else None,
        "alignment_heads": [[0, 1], [1, 0]] if lists else None,
    }
    config = {"vocab_size": VOCAB, "max_target_positions": 448}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer", tokenizer), ("generation_config", generation), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
