"""What a sequence may have beside its tokens: what an encoder reads, and embeddings in the place of tokens.

Keys and values depend on it as they do on the text, so that its digest is part of every key under which they are
shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.errors import PromptError
from paceline.utils import shortened

Array = npt.NDArray[Any]
KINDS: Final = ("encoder_tokens", "features", "embeddings")


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """Embeddings that are fed in the place of a prompt's tokens start .. start + n - 1.

    Attributes:
        start: position of the first one.
        embeddings: (n, hidden) floating-point numbers, as the model's own embedding gives them.
    """

    start: int
    embeddings: Array

    @property
    def stop(self) -> int:
        """Position behind the last one."""
        return self.start + len(self.embeddings)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What one sequence has beside its tokens; arrays are copied and read only.

    Attributes:
        encoder_tokens: ids of the text that an encoder reads; empty where there is none.
        features: arrays that an encoder reads, by name: integers, floating-point numbers or booleans of any shape.
        embeddings: spans of the prompt that are fed as embeddings, in order and apart.
        digest: names the contents: equal for equal ones, in every process; "" where there are none.
    Raises:
        PromptError: something else.
    """

    encoder_tokens: Sequence[int] = ()
    features: Mapping[str, Array] = field(default_factory=dict)
    embeddings: Sequence[EmbeddedSpan] = ()
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        tokens = tuple(self.encoder_tokens)
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise PromptError(f"encoder_tokens must be integers in 0..{2**31 - 1}, got {shortened(token)}")
        set_field(self, "encoder_tokens", tokens)
        set_field(self, "features", {str(name): _frozen(name, self.features[name]) for name in sorted(self.features)})
        set_field(self, "embeddings", tuple(_frozen_spans(self.embeddings)))
        if self.kinds:
            set_field(self, "digest", _digest(self._arrays()))

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.digest)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the attributes that hold something."""
        return tuple(kind for kind in KINDS if len(getattr(self, kind)))

    def described(self) -> str:
        """What there is, for messages: kinds and sizes."""
        sizes = {
            "encoder_tokens": f"{len(self.encoder_tokens)} ids",
            "features": _joined([f"{name} {array.shape}" for name, array in self.features.items()]),
            "embeddings": _joined([f"at {span.start}..{span.stop - 1}" for span in self.embeddings]),
        }
        return ", ".join(f"{kind} ({sizes[kind]})" for kind in self.kinds)

    def _arrays(self) -> Iterator[tuple[str, str, Array]]:
        """All contents by kind and name."""
        yield "encoder_tokens", "", np.asarray(self.encoder_tokens, "<i8")
        for name, array in self.features.items():
            yield "features", name, array
        for span in self.embeddings:
            yield "embeddings", str(span.start), span.embeddings


def _joined(items: Sequence[str], most: int = 4) -> str:
    return ", ".join(items if len(items) <= most else [*items[:most], f"and {len(items) - most} more"])


def _frozen(name: object, array: object) -> Array:
    """A copy of an array in one layout on every machine."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise PromptError(f"input {name!r} must be a NumPy array of numbers, got {shortened(array)}")
    copied = array.astype(array.dtype.newbyteorder("<"), order="C")
    copied.setflags(write=False)
    return copied


def _frozen_spans(spans: Sequence[EmbeddedSpan]) -> Iterator[EmbeddedSpan]:
    behind = 0
    for span in spans:
        embeddings = _frozen("embeddings", span.embeddings)
        if embeddings.ndim != 2 or embeddings.dtype.kind != "f" or not embeddings.size:
            raise PromptError(
                f"embeddings must be floating-point arrays (n, hidden) with n > 0, got {embeddings.dtype} of shape "
                f"{embeddings.shape}"
            )
        if span.start < behind:
            raise PromptError(
                f"spans of embeddings must be in order and apart, got one at {span.start} where the one before ends "
                f"at {behind}"
            )
        behind = span.start + len(embeddings)
        yield EmbeddedSpan(span.start, embeddings)


def _digest(arrays: Iterator[tuple[str, str, Array]]) -> str:
    """Each array behind a line that says what it is and how long."""
    hasher = sha256()
    for kind, name, array in arrays:
        hasher.update(json.dumps([kind, name, array.dtype.str, array.shape]).encode() + b"\n")
        hasher.update(array.tobytes())
    return hasher.hexdigest()


NO_INPUTS: Final = Inputs()
"""Of a sequence that is tokens alone."""
