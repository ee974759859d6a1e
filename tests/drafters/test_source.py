"""Drafters that copy read what an encoder has read as a second text, before the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup.copyspec import CopySpecDrafter
from paceline.drafters.lookup.ngram import NgramDrafter
from paceline.drafters.suffix.drafter import SuffixDrafter
from paceline.tree import EMPTY_TREE, Budget

ARGS = DrafterArgs(vocab_size=1000, index=1, max_context=1000, fingerprint=lambda: "words")
SOURCE = list(range(41, 61))
DRAFTERS: list[tuple[Any, dict[str, Any]]] = [
    (NgramDrafter, {}),
    (SuffixDrafter, {}),
    (CopySpecDrafter, {"copyspec_gamma": 3}),
]


def drafted(drafter: Any, state: Any) -> list[int]:
    tokens: list[int] = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])[0].tokens.tolist()
    return tokens


@pytest.mark.parametrize(("kind", "options"), DRAFTERS)
def test_the_source_is_copied_from(kind: Any, options: dict[str, Any]) -> None:
    """With the control that without the source there is nothing to copy; a fork goes on alone."""
    drafter = kind(ARGS, **options)
    for source, wanted in ((SOURCE, [46, 47, 48]), (None, [])):
        context = Context("one", [7, 42, 43, 44, 45], 1, source=source)
        (state,) = drafter.begin([context])
        assert drafted(drafter, state) == wanted
        other = Context("two", list(context.tokens), 1, source=source)
        twin = drafter.fork(state, other)
        context.tokens += [46, 47, 48, 49]
        other.tokens += [52, 53, 54, 55]
        assert drafted(drafter, state) == ([50, 51, 52] if source else [])
        assert drafted(drafter, twin) == ([56, 57, 58] if source else [])
