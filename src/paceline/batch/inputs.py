"""The file of requests is checked as a whole before anything is decoded, then read line by line from where they lie.

Of a line only its place, a digest and a key of its prompt's beginnings are kept, so that the file may be larger than
memory. The digest is part of the answer's id: it tells which answers of an earlier run belong to which requests.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError, PromptError
from paceline.utils import BEGINNINGS, KEY_BYTES, beginnings, shortened

DIGEST: Final = 12
"""A digest has so many bytes."""

TOLD: Final = 3
"""An error tells so many damaged lines."""

PROMPT: Final = ("cache_salt", "prompt_cache_key", "tools", "instructions", "messages", "prompt", "input")
"""A prompt is made from these fields of a body, in this order."""

Json = dict[str, Any]


class BatchRequest(BaseModel):
    """Is one line of a file of requests, as OpenAI's batches have it."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: Json

    @property
    def digest(self) -> bytes:
        """Tells requests apart by all that the answer depends on."""
        return _digest([self.custom_id, self.url, self.body])

    @property
    def id(self) -> str:
        """Names its answer: the same in every run."""
        return f"batch_req_{self.digest.hex()}"

    def beginnings(self) -> bytes:
        """Return a key for each length of `BEGINNINGS` that the prompt has; requests that begin alike have the same
        first keys.
        """
        return b"".join(beginnings(json.dumps([self.url, *map(self.body.get, PROMPT)])))


class DamagedLinesError(ConfigError):
    """Raised for a file with lines that cannot be answered.

    Attributes:
        faults: number of a line, from 1 -> what is wrong with it, of the first few.
        rest: how many others there are, in words; empty where there are none.
    """

    def __init__(self, path: Path, faults: Mapping[int, str], more: int = 0) -> None:
        self.faults = faults
        self.rest = f"{more} more line{'s are' if more > 1 else ' is'} damaged" if more else ""
        told = [f"line {number} {why}" for number, why in faults.items()]
        super().__init__(f"{str(path)!r}: {'; '.join(filter(None, [*told, self.rest]))}; nothing was decoded")


@dataclass(frozen=True, slots=True)
class _DamagedError(Exception):
    """Raised for a line that is no request."""

    why: str


class Requests:
    """Reads the requests of a file, by their index in it.

    Args:
        path: a file of JSON lines; empty lines are skipped.
    Raises:
        PromptError: it cannot be read, or holds none.
        DamagedLinesError: damaged lines, or a custom_id twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets, self._lengths, self._numbers = array("Q"), array("Q"), array("Q")
        self._digests: list[bytes] = []
        self._keys: list[bytes] = []
        self._known: dict[bytes, int] = {}
        faults, count = dict[int, str](), 0
        try:
            self._stream = path.open("rb")
            for number, offset, line in self._lines():
                try:
                    self._add(number, offset, line)
                except _DamagedError as damaged:
                    count += 1
                    faults |= {number: damaged.why} if count <= TOLD else {}
        except OSError as error:
            raise PromptError(f"cannot read {str(path)!r} ({error.strerror}); give a file of JSON lines") from None
        if faults:
            raise DamagedLinesError(path, faults, count - len(faults))
        if not len(self):
            raise PromptError(f"{str(path)!r} holds no requests; give at least one line")

    def __len__(self) -> int:
        return len(self._offsets)

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        for number, line in enumerate(self._stream, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)

    def _add(self, number: int, offset: int, line: bytes) -> None:
        """Check a line, and keep of it what finds it again."""
        request = _parsed(line)
        name = _digest(request.custom_id)
        if (before := self._known.setdefault(name, len(self))) != len(self):
            first = f"{shortened(request.custom_id)} of line {self._numbers[before]}"
            raise _DamagedError(f"has the custom_id {first} again: give each line its own")
        self._offsets.append(offset)
        self._lengths.append(len(line))
        self._numbers.append(number)
        self._digests.append(request.digest)
        self._keys.append(request.beginnings())

    def find(self, custom_id: str) -> int | None:
        """Return the index of a request; None where there is none with this custom_id."""
        return self._known.get(_digest(custom_id))

    def id(self, index: int) -> str:
        """Return the id of the answer to a request."""
        return f"batch_req_{self._digests[index].hex()}"

    def line(self, index: int) -> int:
        """Return the number of a request's line, from 1."""
        return self._numbers[index]

    def read(self, index: int) -> BatchRequest:
        """Read a request from the file.

        Raises:
            ConfigError: the file has changed.
        """
        self._stream.seek(self._offsets[index])
        try:
            request = _parsed(self._stream.read(self._lengths[index]))
        except _DamagedError:
            request = None
        if request is None or request.digest != self._digests[index]:
            raise ConfigError(f"{str(self.path)!r} was changed while it was read; run the same command again")
        return request

    def order(self) -> list[int]:
        """Return all indexes, those of prompts that begin alike one after the other, so that what they share is decoded
        once; otherwise as in the file. To be asked once: the keys are let go.
        """
        keys, self._keys = self._keys, []
        return _grouped(list(range(len(self))), keys, 0)

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()


def _parsed(line: bytes) -> BatchRequest:
    """Read a line as a request."""
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"is not JSON ({error}): write one request on each line") from None
    if not isinstance(value, dict):
        raise _DamagedError("is not an object: give custom_id, method, url and body")
    try:
        request = BatchRequest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = "is not known: leave it out" if first["type"] == "extra_forbidden" else f"is wrong: {first['msg']}"
        raise _DamagedError(f"{where} {why}") from None
    if request.body.get("stream"):
        raise _DamagedError("body.stream is wrong: leave it out, answers are written whole")
    return request


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


def _grouped(indexes: list[int], keys: list[bytes], level: int) -> list[int]:
    """Put indexes with equal keys together, at this level and those after it; groups are ordered by their firsts."""
    if len(indexes) < 3 or level == len(BEGINNINGS):
        return indexes
    groups: dict[bytes, list[int]] = {}
    for index in indexes:
        groups.setdefault(keys[index][level * KEY_BYTES : (level + 1) * KEY_BYTES], []).append(index)
    return [index for group in groups.values() for index in _grouped(group, keys, level + 1)]
