"""Which tokens a draft model's head keeps: the most frequent ones of a corpus, and those that nothing can be written
without.

Tokens outside have q = 0: a verifier draws them from what is left of p, so that the output's distribution stays the
target's. Kept in any case: special tokens, and tokens of a single byte, of which every text can be made. Texts that the
target itself wrote tell more than other corpora. Source: VocabTrim (arXiv:2506.22694).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.models.loading import token_bytes
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer

Counts = npt.NDArray[np.int64]


def check(size: int | None, file: str | None) -> None:
    """Reject values of the two options that make no sense.

    Raises:
        ConfigError: a size that is no positive integer, a file without a size.
    """
    if size is not None:
        integer("draft_vocab_size", size, 1)
    need(file is None or (isinstance(file, str | Path) and str(file) != ""), "draft_vocab_file", "be a path", file)
    need(file is None or size is not None, "draft_vocab_file", "be given together with draft_vocab_size", file)


def kept_tokens(size: int, file: str | None, tokenizer: Tokenizer, vocab_size: int) -> list[int] | None:
    """`size` ids below `vocab_size`, ascending; None where that is all of them.

    Args:
        file: counts or text (see `read_counts`); None takes the lowest ids, which byte-pair vocabularies learned first.
    Raises:
        ConfigError: fewer than have to be kept; a file that cannot be read.
    """
    counts = np.zeros(vocab_size, np.int64) if file is None else read_counts(Path(file), tokenizer, vocab_size)
    if size >= vocab_size:
        return None
    always = sorted(token for token in indispensable(tokenizer) if token < vocab_size)
    rule = f"be {len(always)} or more: special tokens and single bytes are always kept"
    need(size >= len(always), "draft_vocab_size", rule, size)
    counts[always] = np.iinfo(np.int64).max
    by_count = np.argsort(-counts, kind="stable")[:size]
    found: list[int] = np.sort(by_count).tolist()
    return found


def indispensable(tokenizer: Tokenizer) -> set[int]:
    """Special tokens, the end token, and all that write one byte."""
    single = {
        index for index, written in enumerate(token_bytes(tokenizer)) if written is not None and len(written) == 1
    }
    ends = {index for index in (tokenizer.bos_id, tokenizer.eos_id) if index is not None}
    return single | set(tokenizer.special_ids) | ends


def read_counts(path: Path, tokenizer: Tokenizer, vocab_size: int) -> Counts:
    """(v,) how often each token occurs, from a file of one of these kinds.

    A JSON object {"token id": count}; a JSON list of token ids, most frequent first; or any other UTF-8 text, which is
    encoded.

    Raises:
        ConfigError: no such file, no UTF-8, or JSON of another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"draft_vocab_file {str(path)!r} cannot be read ({why}); give JSON counts or a UTF-8 text"
        ) from None
    found = _json(text) if text.lstrip()[:1] in ("{", "[") else None
    if isinstance(found, dict):
        pairs = [(_id(path, key), _count(path, value)) for key, value in found.items()]
    elif isinstance(found, list):
        pairs = [(_id(path, token), len(found) - position) for position, token in enumerate(found)]
    else:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        return np.bincount([token for token in ids if token < vocab_size], minlength=vocab_size)
    counts = np.zeros(vocab_size, np.int64)
    for token, count in pairs:
        if token < vocab_size:
            counts[token] += count
    return counts


def _json(text: str) -> Any:
    """The value of a JSON text, None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _id(path: Path, given: object) -> int:
    text = str(given)
    if isinstance(given, bool) or not text.isdecimal() or len(text) > 12:
        raise ConfigError(
            f"draft_vocab_file {str(path)!r} must hold token ids, got {text[:60]!r}; give {{id: count}} or a list of "
            f"ids"
        )
    return int(text)


def _count(path: Path, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**53:
        raise ConfigError(f"draft_vocab_file {str(path)!r} must hold counts of 0 or more, got {str(given)[:60]!r}")
    return given
