"""What two vocabularies have in common, and one numbering for both.

Two tokens are the same where they write the same bytes into a text, however their vocabularies spell them; special
tokens where they have the same name, or the same office (start, end). In the common numbering a shared token has the
target's id, and one that only the draft has, V plus its own, V being the target's vocabulary.

Source: token-level intersection, Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies (arXiv:2502.05202).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.checkpoints import BYTE, token_bytes
from paceline.errors import DrafterError, UnsupportedModelError
from paceline.models import MappedRunner

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.drafters.base import Models
    from paceline.models import Runner

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shared:
    """Maps the tokens that both vocabularies have.

    Attributes:
        target_of: the draft's id -> the target's; specials: those of special tokens among them, the target's id -> the
            draft's.
    """

    target_of: dict[int, int]
    specials: dict[int, int]

    @property
    def texts(self) -> int:
        """Count those that write text."""
        return len(self.target_of) - len(self.specials)


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> Shared:
    """What both have; each token of one is the same as at most one of the other."""
    mine, theirs = _by_bytes(target), _by_bytes(draft)
    shared = {theirs[written]: mine[written] for written in theirs.keys() & mine.keys()}
    specials = _specials(target, draft)
    return Shared(shared | {theirs: mine for mine, theirs in specials.items()}, specials)


def _by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes -> the token that writes them: the lowest, and one that is more than a lonely byte where there is a
    choice.
    """
    spelled, token_of = tokenizer.tokens(), dict[bytes, int]()
    lonely = []
    for index, written in enumerate(token_bytes(tokenizer)):
        if written and BYTE.fullmatch(spelled[index]):
            lonely.append((written, index))
        elif written:
            token_of.setdefault(written, index)
    for written, index in lonely:
        token_of.setdefault(written, index)
    return token_of


def _specials(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Special tokens of the target -> the draft's, by office, then by name."""
    counterparts: dict[int, int] = {}
    for mine, theirs in ((target.eos_id, draft.eos_id), (target.bos_id, draft.bos_id)):
        if mine is not None and theirs is not None and mine not in counterparts and theirs not in counterparts.values():
            counterparts[mine] = theirs
    names, spelled = {draft.tokens()[index]: index for index in draft.special_ids}, target.tokens()
    for mine in sorted(target.special_ids):
        other = names.get(spelled[mine])
        if other is not None and mine not in counterparts and other not in counterparts.values():
            counterparts[mine] = other
    return counterparts


def check_shared(shared: Shared, model: str, target: Tokenizer, draft: Tokenizer) -> None:
    """Reject vocabularies that have nothing in common.

    Raises:
        DrafterError: they share no token that writes text.
    """
    if not shared.texts:
        raise DrafterError(
            f"draft model {model!r} shares no token with the target: none of its {draft.vocab_size} writes what one of "
            f"{target.vocab_size} does; choose another draft model"
        )


class Numbering:
    """The common numbering of a target and a draft model.

    Args:
        vocab_size: V, of the target's head. draft_size: of the draft's head.
    Attributes:
        common_of: (draft_size,) the number of each token of the draft.
    """

    def __init__(self, shared: Shared, vocab_size: int, draft_size: int) -> None:
        self.vocab_size = vocab_size
        pairs = sorted(
            (token, other) for token, other in shared.target_of.items() if token < draft_size and other < vocab_size
        )
        self.shared_ids = np.array([token for token, _ in pairs], np.int64)
        self.names: Ids = np.full(draft_size, -1, np.int64)
        self.names[self.shared_ids] = [other for _, other in pairs]
        self.common_of: Ids = np.where(self.names >= 0, self.names, vocab_size + np.arange(draft_size))
        self.into: Ids = np.full(vocab_size + draft_size, -1, np.int64)
        self.into[self.common_of] = np.arange(draft_size)

    def runner(self, inner: Runner) -> MappedRunner:
        """The draft model under the common numbering: logits (r, V), -inf for what it does not share.

        Their softmax is q of the intersection: the draft's distribution given that its token is shared.
        """
        if isinstance(inner, MappedRunner):
            return inner.renamed(self.into, self.names, self.vocab_size)
        return MappedRunner(inner, self.into, self.shared_ids, self.names[self.shared_ids], self.vocab_size)

    def numbers(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the draft in the common numbering; ids beyond its head are left out."""
        size, common = len(self.common_of), self.common_of
        return [int(common[token]) for token in tokens if token < size]


def open_shared(
    models: Models, model: str, shared: Shared, vocab_size: int, device: str | None = None
) -> tuple[MappedRunner, Numbering]:
    """The draft model under the common numbering; a native one computes the shared rows of its head only.

    Args:
        device: as for `Models.open`.
    Raises:
        what `Models.open` raises.
    """
    rows = sorted(token for token, other in shared.target_of.items() if other < vocab_size)
    try:
        inner = models.open(model, head_rows=rows, other_tokens=True, device=device)
    except UnsupportedModelError:
        inner = models.open(model, other_tokens=True, device=device)
    numbering = Numbering(shared, vocab_size, inner.info.vocab_size)
    return numbering.runner(inner), numbering
