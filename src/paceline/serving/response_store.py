"""Responses that clients may ask for again, in SQLite: by id and key, until they are old or too many.

Each is kept with all of the input it was made from, so that a conversation goes on where an earlier response of it has
been deleted. A sum kept by triggers tells the length of all, so that several servers can share a file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.serving.protocol import ApiError

Json = dict[str, Any]

OURS: Final = 0x5061636C
"""`application_id` of such a file."""

WAIT: Final = 10.0
"""Seconds to wait for another process that writes."""

TABLES: Final = (
    f"PRAGMA application_id = {OURS}",
    """CREATE TABLE responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        expires REAL NOT NULL,
        bytes INTEGER NOT NULL,
        response TEXT NOT NULL,
        input TEXT NOT NULL
    )""",
    "CREATE INDEX by_age ON responses (expires)",
    "CREATE TABLE total (bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0)",
    "CREATE TRIGGER more AFTER INSERT ON responses BEGIN UPDATE total SET bytes = bytes + NEW.bytes; END",
    "CREATE TRIGGER less AFTER DELETE ON responses BEGIN UPDATE total SET bytes = bytes - OLD.bytes; END",
)


@dataclass(slots=True)
class Stored:
    """A response as it was sent, and the items that it was made from, those of earlier turns first."""

    response: Json
    input: list[Json]


class ResponseStore:
    """Keeps responses. Calls block and may come from any thread.

    Args:
        file: of the database; None is memory.
        most: bytes of all texts; the oldest go.
        seconds: that a response is kept.
    Raises:
        ConfigError: a file that cannot be used.
    """

    def __init__(self, file: str | None, most: int, seconds: float) -> None:
        self.most, self._seconds, self._lock = most, seconds, Lock()
        try:
            path = None if file is None else Path(file).expanduser()
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._base = sqlite3.connect(
                path or ":memory:", timeout=WAIT, isolation_level=None, check_same_thread=False
            )
            self._prepare(path)
        except (OSError, RuntimeError, sqlite3.Error) as error:
            raise ConfigError(f"response_file must be a database of responses, got {file!r} ({error})") from None

    def _prepare(self, path: Path | None) -> None:
        def found(question: str) -> int:
            return int(self._base.execute(question).fetchone()[0])

        empty = "SELECT count(*) = 0 FROM sqlite_schema"
        if not found(empty) and found("PRAGMA application_id") != OURS:
            raise sqlite3.DatabaseError("it is another program's")
        if path is not None:
            path.chmod(0o600)  # and so is what SQLite puts beside it
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            self._base.execute(f"PRAGMA {pragma}")
        with self._change():
            for statement in TABLES if found(empty) else ():
                self._base.execute(statement)
            self._forget(time.time())

    @contextmanager
    def _change(self) -> Iterator[None]:
        """All or nothing, on disk at the end."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._base.execute("COMMIT")
            except BaseException:
                self._base.execute("ROLLBACK")
                raise

    def _forget(self, now: float) -> None:
        self._base.execute("DELETE FROM responses WHERE expires <= ?", (now,))

    def put(self, owner: str, response: Json, items: list[Json]) -> None:
        """Keep a response; what it displaces is forgotten.

        Raises:
            ApiError: it is too large, or cannot be written.
        """
        texts = [_dumped(response), _dumped(items)]
        size = sum(map(len, texts))
        if size > self.most:
            raise ApiError(f"store: the response and its input have {size} bytes, of which this server stores "
                           f"{self.most}; use store: false", status=413, param="store")  # fmt: skip
        now = time.time()
        row = (response["id"], owner, now + self._seconds, size, *texts)
        with _told(), self._change():
            self._forget(now)
            self._base.execute(
                "INSERT INTO responses (id, owner, expires, bytes, response, input) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            while self._base.execute("SELECT bytes FROM total").fetchone()[0] > self.most:
                self._base.execute("DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)")

    def holds(self, items: list[Json]) -> bool:
        """Whether a response to this input may be kept at all."""
        return len(_dumped(items)) <= self.most

    def get(self, owner: str, name: str) -> Stored | None:
        """A response of this owner; None where there is none."""
        asked = "SELECT response, input FROM responses WHERE id = ? AND owner = ? AND expires > ?"
        with _told(), self._lock:
            row = self._base.execute(asked, (name, owner, time.time())).fetchone()
        return None if row is None else Stored(json.loads(row[0]), json.loads(row[1]))

    def delete(self, owner: str, name: str) -> bool:
        """Forget a response; whether there was one."""
        asked = "DELETE FROM responses WHERE id = ? AND owner = ? AND expires > ?"
        with _told(), self._change():
            return self._base.execute(asked, (name, owner, time.time())).rowcount > 0

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._base.close()


@contextmanager
def _told() -> Iterator[None]:
    """What SQLite cannot do is an error for the client."""
    try:
        yield
    except sqlite3.Error as error:
        raise ApiError(f"the stored responses cannot be used ({error})", status=500, code="store_failed") from None


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII alone: any text can be stored, and its length is in bytes
