"""The file of answers survives a crash: whole lines are on the disk before they count, and a torn one is cut off.

An answer is found again by its id, which holds the digest of its request. So a file goes on where a killed run stopped,
and one that belongs to other requests is rejected before it is touched.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

from filelock import FileLock, Timeout

from paceline.batch.inputs import Requests
from paceline.errors import ConfigError
from paceline.utils import sync_folder

MARK: Final = b'{"id":"batch_req_'
"""Every line begins with this."""

NEW: Final = -1


class ResultFile:
    """Appends answers to requests as they come; it is a context, in which no other process writes them.

    Args:
        path: of the file; what an earlier run wrote is kept.
        model: that the answers must be of; None is any.
        fresh: forget what an earlier run wrote.
    Raises:
        ConfigError: the file is not of these requests, or another process writes it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, requests: Requests, *, model: str | None = None, fresh: bool = False) -> None:
        self.path, self._requests, self._model, self._fresh = path, requests, model, fresh
        self._offsets = array("q", [NEW]) * len(requests)
        self._lock = FileLock(f"{path}.lock", blocking=False)
        self.count = 0

    def __contains__(self, index: int) -> bool:
        return self._offsets[index] != NEW

    def __enter__(self) -> Self:
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{str(self.path)!r} is written by another run; wait for it, or name another file"
            ) from None
        try:
            self._size = self._scanned() if self.path.exists() else 0
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            sync_folder(self.path.parent)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
        self._unlock()

    def _unlock(self) -> None:
        """Let others write; the file of the lock goes first, while nobody else can have it."""
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def _scanned(self) -> int:
        """Note the whole lines, and return the length of the file that stays."""
        offset = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):  # torn; after a loss of power it may be zeros
                    if line.strip(b"\0") and not (line.startswith(MARK) or MARK.startswith(line)):
                        raise self._wrong(number, "is no answer of a batch")
                    break
                if not line.startswith(MARK):
                    raise self._wrong(number, "is no answer of a batch")
                if not self._fresh:
                    self._note(number, line, offset)
                offset += len(line)
        return 0 if self._fresh else offset

    def _note(self, number: int, line: bytes, offset: int) -> None:
        """Check a line of an earlier run against the requests, and remember where it is."""
        try:
            answer: dict[str, Any] = json.loads(line)
            index = self._requests.find(name := answer["custom_id"])
            model = answer["response"]["body"].get("model")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise self._wrong(number, "is damaged") from None
        if index is None or answer["id"] != self._requests.id(index):
            what = "is not in" if index is None else "is another request in"
            raise self._wrong(number, f"answers {name!r}, which {what} {str(self._requests.path)!r}")
        if index in self:
            raise self._wrong(number, f"answers {name!r} once more")
        if self._model is not None and model != self._model:
            raise self._wrong(number, f"is of the model {model!r}, not {self._model!r}")
        self._offsets[index] = offset
        self.count += 1

    def _wrong(self, number: int, why: str) -> ConfigError:
        return ConfigError(f"{str(self.path)!r} line {number} {why}; name another file, or remove what is wrong")

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Acknowledge answers: when this returns they are on the disk.

        Args:
            lines: with the indexes of their requests.
        Raises:
            ConfigError: the disk is full, for example.
        """
        data = memoryview(b"".join(line for _, line in lines))
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            what = f"{str(self.path)!r} cannot be written ({error.strerror})"
            raise ConfigError(f"{what}; make room and run the same command again") from None
        for index, line in lines:
            self._offsets[index] = self._size
            self._size += len(line)
            self.count += 1

    def sort(self) -> None:
        """Write the file anew in the order of the requests, in one piece; a file without a line is removed."""
        places = [offset for offset in self._offsets if offset != NEW]
        if not places:
            self.path.unlink(missing_ok=True)
        elif any(after < before for before, after in pairwise(places)):
            draft = self.path.with_name(self.path.name + ".part")
            with draft.open("wb") as stream:
                stream.writelines(self._lines(places))
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(self.path)
        sync_folder(self.path.parent)

    def _lines(self, places: Sequence[int]) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            for place in places:
                stream.seek(place)
                yield stream.readline()
