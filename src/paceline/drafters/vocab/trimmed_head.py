"""Which tokens a draft model's head keeps: the most frequent ones of what was counted, and those that nothing can be
written without.

Tokens outside have q = 0: a verifier draws them from what is left of p, so that the output's distribution stays the
target's. Kept in any case: special tokens, and tokens of a single byte, of which every text can be made. Counts of
texts that the target itself wrote (`token_counts`) are used wherever they are. Source: VocabTrim (arXiv:2506.22694).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.checkpoints import token_bytes
from paceline.drafters.vocab.token_counts import AGAIN, FORMAT, STEP, TokenCounts, most_frequent
from paceline.errors import ConfigError
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.drafters.base import Models

Counts = npt.NDArray[np.int64]

ALL: Final = "all"
"""The size of a head that keeps every token, whatever was counted."""

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class HeadCut:
    """Says which rows a head keeps, and why.

    Attributes:
        tokens: ascending ids, None for all. words: what was decided and why, for people; "" where nothing was.
    """

    tokens: list[int] | None
    words: str = ""


def check(size: int | str | None, file: str | None) -> None:
    """Reject values of the two options that make no sense.

    Raises:
        ConfigError: a size that is neither a positive integer nor `ALL`, a file beside `ALL`, what is no path.
    """
    if isinstance(size, str):
        need(size == ALL, "draft_vocab_size", f"be an integer of 1 or more, or {ALL!r}", size)
    elif size is not None:
        integer("draft_vocab_size", size, 1)
    need(file is None or (isinstance(file, str | Path) and str(file) != ""), "draft_vocab_file", "be a path", file)
    need(file is None or size != ALL, "draft_vocab_file", f"be left out where draft_vocab_size is {ALL!r}", file)


def cut_head(
    size: int | str | None,
    file: str | None,
    models: Models,
    vocab_size: int,
    *,
    model: str | None = None,
    share: float | None = None,
) -> HeadCut:
    """What the head of a draft keeps.

    Args:
        size: tokens; None leaves it to the counts, of `file` or of the target, without which all are kept.
        vocab_size: of the target. model: the draft's folder or hub id; None for a copy of the target.
        share: of the head in what a step of the draft reads, where it is no whole model.
    Raises:
        ConfigError: fewer than have to be kept; a file that cannot be read, or does not say how many tokens are enough.
    """
    tokenizer, counts = models.tokenizer, _known(models, vocab_size) if file is None and size != ALL else None
    always = {token for token in indispensable(tokenizer) if token < vocab_size}
    if size == ALL or (size is None and file is None and counts is None):
        return HeadCut(None)
    where = "chosen by what the target wrote" if file is None else f"chosen by {file}"
    if size is None:
        counts = _halves(Path(str(file)), tokenizer, vocab_size) if counts is None else counts
        size = counts.best_size(always, models.head_share(model) if share is None else share)
        if size >= vocab_size:
            return HeadCut(
                None, f"the head keeps all {vocab_size:,} tokens: a smaller one would lose more than it saves"
            )
    elif counts is None and file is None:
        where = "the lowest ids; `paceline count-tokens` finds better ones"
    total = None if counts is None else counts.total
    kept = kept_tokens(int(size), file if total is None else total, tokenizer, vocab_size)
    if kept is None:
        return HeadCut(None)
    words = f"the head keeps {len(kept):,} of {vocab_size:,} tokens, {where}"
    if counts is not None and counts.tokens:
        words += f"; they cover about {100 * counts.coverage(always)[len(kept) // STEP]:.1f} % of its other texts"
    return HeadCut(kept, words)


def kept_tokens(size: int, counts: str | Counts | None, tokenizer: Tokenizer, vocab_size: int) -> list[int] | None:
    """`size` ids below `vocab_size`, ascending; None where that is all of them.

    Args:
        counts: (v,), or a file of counts or text (see `read_counts`); None takes the lowest ids, which byte-pair
            vocabularies learned first.
    Raises:
        ConfigError: fewer than have to be kept; a file that cannot be read.
    """
    if counts is None:
        counts = np.zeros(vocab_size, np.int64)
    elif not isinstance(counts, np.ndarray):
        counts = read_counts(Path(counts), tokenizer, vocab_size)
    if size >= vocab_size:
        return None
    always = {token for token in indispensable(tokenizer) if token < vocab_size}
    rule = f"be {len(always)} or more: special tokens and single bytes are always kept"
    need(size >= len(always), "draft_vocab_size", rule, size)
    kept: list[int] = np.sort(most_frequent(counts, always)[:size]).tolist()
    return kept


def _known(models: Models, vocab_size: int) -> TokenCounts | None:
    """The counts of the target that are there; None where there are none, or none of use (logged)."""
    if (path := models.counts_file()) is None:
        return None
    try:
        return _checked(TokenCounts.load(path), path, models.tokenizer).fitted(vocab_size)
    except ConfigError as error:
        logger.warning("the draft's head keeps all tokens: %s", error)
        return None


def _checked(counts: TokenCounts, path: Path, tokenizer: Tokenizer) -> TokenCounts:
    if counts.tokenizer != tokenizer.fingerprint():
        raise ConfigError(f"counts in {str(path)!r} are of another tokenizer (that of {counts.model}); {AGAIN}")
    return counts


def _halves(path: Path, tokenizer: Tokenizer, vocab_size: int) -> TokenCounts:
    """The counts of a file that tells how many tokens are enough.

    Raises:
        ConfigError: plain counts, or a file that cannot be read.
    """
    content = _read(path)
    if isinstance(content, TokenCounts):
        return _checked(content, path, tokenizer).fitted(vocab_size)
    if not isinstance(content, str):
        raise ConfigError(
            f"draft_vocab_file {str(path)!r} holds plain counts, which do not say how many tokens are enough; give "
            "draft_vocab_size too"
        )
    ids = tokenizer.encode(content, add_special_tokens=False)
    return TokenCounts.of([ids], vocab_size, tokenizer=tokenizer.fingerprint(), model="", origin=str(path))


def indispensable(tokenizer: Tokenizer) -> set[int]:
    """Special tokens, the end token, and all that write one byte."""
    single = {
        index for index, written in enumerate(token_bytes(tokenizer)) if written is not None and len(written) == 1
    }
    ends = {index for index in (tokenizer.bos_id, tokenizer.eos_id) if index is not None}
    return single | set(tokenizer.special_ids) | ends


def read_counts(path: Path, tokenizer: Tokenizer, vocab_size: int) -> Counts:
    """(v,) how often each token occurs, from a file of one of these kinds.

    What `paceline count-tokens` writes; a JSON object {"token id": count}; a JSON list of token ids, most frequent
    first; or any other UTF-8 text, which is encoded.

    Raises:
        ConfigError: no such file, no UTF-8, JSON of another form, or counts of another tokenizer.
    """
    content = _read(path)
    if isinstance(content, TokenCounts):
        return _checked(content, path, tokenizer).fitted(vocab_size).total
    if isinstance(content, str):
        ids: Sequence[int] = tokenizer.encode(content, add_special_tokens=False)
        return np.bincount([token for token in ids if token < vocab_size], minlength=vocab_size)
    if isinstance(content, dict):
        pairs = [(_id(path, key), _count(path, value)) for key, value in content.items()]
    else:
        pairs = [(_id(path, token), len(content) - position) for position, token in enumerate(content)]
    counts = np.zeros(vocab_size, np.int64)
    for token, count in pairs:
        if token < vocab_size:
            counts[token] += count
    return counts


def _read(path: Path) -> TokenCounts | dict[str, Any] | list[Any] | str:
    """What is in a file: counts of two halves, plain counts, ids by frequency, or a text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"draft_vocab_file {str(path)!r} cannot be read ({why}); give JSON counts or a UTF-8 text"
        ) from None
    content = _json(text) if text.lstrip()[:1] in ("{", "[") else None
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return TokenCounts.parse(content, path)
    return content if isinstance(content, dict | list) else text


def _json(text: str) -> Any:
    """The value of a JSON text, None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _id(path: Path, key: object) -> int:
    text = str(key)
    if isinstance(key, bool) or not text.isdecimal() or len(text) > 12:
        raise ConfigError(
            f"draft_vocab_file {str(path)!r} must hold token ids, got {text[:60]!r}; give {{id: count}} or a list of "
            f"ids"
        )
    return int(text)


def _count(path: Path, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**53:
        raise ConfigError(f"draft_vocab_file {str(path)!r} must hold counts of 0 or more, got {str(count)[:60]!r}")
    return count
