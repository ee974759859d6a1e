"""Responses that clients may ask for again, in SQLite: by id and key, until they are old or too many.

Each is kept with all of the input it was made from, so that a conversation goes on where an earlier response of it has
been deleted. Sums kept by triggers tell the length of all and of each key's, so that several servers can share a file.
Where there are too many, the key with the most gives way. A reserve of disk space beside the file, given up when the
disk is full, makes deleting work then.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.serving.api_errors import ApiError
from paceline.serving.running_servers import RunningServers

logger = logging.getLogger("paceline.serving")

Json = dict[str, Any]

OURS: Final = 0x5061636C
"""`application_id` of such a file."""

WAIT: Final = 10.0
"""Another process that writes is waited for so many seconds."""

RESERVE: Final = 2**20
"""So many bytes are kept free for deleting on a full disk."""

LOG_PAGES: Final = 32
"""Of the log that wait to be written to the database, which must fit into the reserve."""

FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""A write that finds no room ends with one of these codes."""

LONG_AGO: Final = 0.5
"""A time that takes as many bytes as all others, so that the texts of the row stay where they are."""

NO_ROOM: Final = "it would displace the responses of other keys; delete some of this key's"

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

OWNERS: Final = (
    "CREATE TABLE owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL)",
    "INSERT INTO owners SELECT owner, sum(bytes) FROM responses GROUP BY owner",
    "CREATE INDEX by_owner ON responses (owner)",
    """CREATE TRIGGER more_of_owner AFTER INSERT ON responses BEGIN
        INSERT INTO owners VALUES (NEW.owner, NEW.bytes)
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
    END""",
    """CREATE TRIGGER less_of_owner AFTER DELETE ON responses BEGIN
        UPDATE owners SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
        DELETE FROM owners WHERE owner = OLD.owner AND bytes <= 0;
    END""",
)
"""Files of earlier versions lack these tables."""

BEGUN: Final = (
    "CREATE TABLE begun (id TEXT PRIMARY KEY, server TEXT NOT NULL)",
    "CREATE TRIGGER less_begun AFTER DELETE ON responses BEGIN DELETE FROM begun WHERE id = OLD.id; END",
)
"""Which server answers a response that is stored and has not ended. Files of earlier versions lack this table, too."""

RUNNING: Final = "in_progress"
"""The status of a response that has not ended."""

LOST: Final[dict[str, Any]] = {
    "status": "failed",
    "error": {
        "code": "server_error",
        "message": "the server ended before the answer was complete, or could not store it; send the request again",
    },
}
"""What is told of a response that has not ended and that nobody answers any more."""

OLDEST: Final = """SELECT min(number) FROM responses
    WHERE owner = (SELECT owner FROM owners ORDER BY bytes DESC, owner = ? DESC LIMIT 1)"""
"""The oldest response of the owner who has the most; of this one, where several have."""


@dataclass(slots=True)
class Stored:
    """Is a response as it was sent, with the items that it was made from, those of earlier turns first."""

    response: Json
    input: list[Json]

    @property
    def running(self) -> bool:
        """Whether a server still answers it."""
        return self.response.get("status") == RUNNING


class ResponseStore:
    """Keeps responses. Calls block and may come from any thread.

    Args:
        file: of the database; None is memory.
        most: bytes of all texts; beyond, the oldest of the owner who has the most go.
        seconds: that a response is kept.
        failed: called where the database cannot be used.
    Attributes:
        fault: why the last response could not be written; empty where it could.
    Raises:
        ConfigError: a file that cannot be used.
    """

    def __init__(
        self, file: str | None, most: int, seconds: float, failed: Callable[[], object] = lambda: None
    ) -> None:
        self.most, self._seconds, self._lock = most, seconds, Lock()
        self._failed, self.fault = failed, ""
        self._reserve: Path | None = None
        self._servers: RunningServers | None = None
        try:
            path = None if file is None else Path(file).expanduser()
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._base = sqlite3.connect(
                path or ":memory:", timeout=WAIT, isolation_level=None, check_same_thread=False
            )
            self._prepare(path)
            if path is not None:
                self._reserve = path.with_name(f"{path.name}-reserve")
                self._keep_free()
        except (OSError, RuntimeError, sqlite3.Error) as error:
            raise ConfigError(f"response_file must be a database of responses, got {file!r} ({error})") from None

    def _prepare(self, path: Path | None) -> None:
        """Make the tables, or those that an earlier version had not, and forget what is too old."""

        def number_of(question: str) -> int:
            return int(self._base.execute(question).fetchone()[0])

        empty = "SELECT count(*) = 0 FROM sqlite_schema"
        no_owners = "SELECT count(*) = 0 FROM sqlite_schema WHERE name = 'owners'"
        no_begun = "SELECT count(*) = 0 FROM sqlite_schema WHERE name = 'begun'"
        if not number_of(empty) and number_of("PRAGMA application_id") != OURS:
            raise sqlite3.DatabaseError("it is another program's")
        if path is not None:
            path.chmod(0o600)  # and so is what SQLite puts beside it
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            f"wal_autocheckpoint = {LOG_PAGES}",
        ):
            self._base.execute(f"PRAGMA {pragma}")
        with self._change():
            for statement in TABLES if number_of(empty) else ():
                self._base.execute(statement)
            for statement in OWNERS if number_of(no_owners) else ():
                self._base.execute(statement)
            for statement in BEGUN if number_of(no_begun) else ():
                self._base.execute(statement)
            if path is not None:
                self._servers = RunningServers(path)
            self._forget(time.time())

    def _keep_free(self) -> None:
        """Keep the reserve on disk, where there is room for it."""
        if self._reserve is None or self._reserve.exists():
            return
        try:
            with open(os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(os.urandom(RESERVE))  # which no file system makes smaller
        except OSError as error:
            logger.debug("no room for %s (%s)", self._reserve, error)
            self._give_up_reserve()

    def _give_up_reserve(self) -> None:
        if self._reserve is not None:
            with suppress(OSError):
                self._reserve.unlink(missing_ok=True)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Do all in the block or nothing; it is on disk at the end."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:  # SQLite may have rolled back itself, as on a full disk
                    self._base.execute("ROLLBACK")
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Note what SQLite cannot do, and raise it as an error for the client."""
        try:
            yield
        except sqlite3.Error as error:
            self.fault = str(error)
            self._failed()
            why = f"the stored responses cannot be used ({error})"
            logger.warning("%s", why)
            raise ApiError(why, status=500, code="store_failed") from None

    def _forget(self, now: float) -> None:
        self._base.execute("DELETE FROM responses WHERE expires <= ?", (now,))

    def begin(self, owner: str, response: Json, items: list[Json]) -> None:
        """Keep a response that this server has begun to answer, unless it has ended already: should the server end
        before it, it is found, as failed. What is in memory ends with the server, and has no such beginnings.

        Raises:
            ApiError: as `put`.
        """
        if self._servers is not None:
            self._write(owner, response, items, self._servers.own)

    def put(self, owner: str, response: Json, items: list[Json]) -> None:
        """Keep a response that has ended; what it displaces is forgotten.

        Raises:
            ApiError: it is too large, could only displace responses of owners who have less, or cannot be written.
        """
        self._write(owner, response, items, None)

    def _write(self, owner: str, response: Json, items: list[Json], server: str | None) -> None:
        """Keep a response, which `server` answers; None where it has ended."""
        texts = [_dumped(response), _dumped(items)]
        size = sum(map(len, texts))
        if size > self.most:
            raise ApiError(f"store: the response and its input have {size} bytes, of which this server stores "
                           f"{self.most}; use store: false", status=413, param="store")  # fmt: skip
        now = time.time()
        row = (response["id"], owner, now + self._seconds, size, *texts)
        with self._told(), self._change():
            self._forget(now)
            if server is None:
                self._base.execute("DELETE FROM responses WHERE id = ?", row[:1])
            elif self._base.execute("SELECT 1 FROM responses WHERE id = ?", row[:1]).fetchone():
                return
            added = self._base.execute(
                "INSERT INTO responses (id, owner, expires, bytes, response, input) VALUES (?, ?, ?, ?, ?, ?)", row
            ).lastrowid
            if server is not None:
                self._base.execute("INSERT INTO begun VALUES (?, ?)", (response["id"], server))
            while self._base.execute("SELECT bytes FROM total").fetchone()[0] > self.most:
                (oldest,) = self._base.execute(OLDEST, (owner,)).fetchone()
                if oldest == added:
                    raise ApiError(f"store: {NO_ROOM}", status=413, param="store")
                self._base.execute("DELETE FROM responses WHERE number = ?", (oldest,))
        self.fault = ""
        self._keep_free()

    def holds(self, items: list[Json]) -> bool:
        """Tell whether a response to this input may be kept at all."""
        return len(_dumped(items)) <= self.most

    def get(self, owner: str, name: str, *, running: bool = False) -> Stored | None:
        """Return a response of this owner; None where there is none. One that has not ended, and that no server
        answers any more, has failed.

        Args:
            running: this server answers it.
        """
        if not name.isascii():  # as no id is; SQLite takes no halves of characters
            return None
        asked = """SELECT response, input, server FROM responses LEFT JOIN begun USING (id)
            WHERE id = ? AND owner = ? AND expires > ?"""
        with self._told(), self._lock:
            row = self._base.execute(asked, (name, owner, time.time())).fetchone()
        if row is None:
            return None
        stored, server = Stored(json.loads(row[0]), json.loads(row[1])), row[2]
        if server is not None and not running and not self._answers(server):
            stored.response |= LOST
        return stored

    def _answers(self, server: str) -> bool:
        """Tell whether another server still runs."""
        return self._servers is not None and server != self._servers.own and self._servers.runs(server)

    def delete(self, owner: str, name: str) -> bool:
        """Forget a response; returns whether there was one."""
        with self._told():
            try:
                deleted = self._delete(owner, name)
                self.fault = ""
                return deleted
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in FULL:
                    raise
                self.fault = str(error)
            return self._delete_in_little_room(owner, name)

    def _delete(self, owner: str, name: str) -> bool:
        asked = "DELETE FROM responses WHERE id = ? AND owner = ? AND expires > ?"
        with self._change():
            return self._base.execute(asked, (name, owner, time.time())).rowcount > 0

    def _delete_in_little_room(self, owner: str, name: str) -> bool:
        """Let a response expire, which writes little, and take it out of the file as soon as there is room."""
        self._give_up_reserve()
        try:
            expired = self._expire(owner, name)
        except sqlite3.Error:
            self._empty_log()
            expired = self._expire(owner, name)
        try:
            with self._change():
                self._forget(time.time())
        except sqlite3.Error as error:
            logger.warning("deleted responses are still in the file, until there is room (%s)", error)
        self._empty_log()
        self._keep_free()
        return expired

    def _expire(self, owner: str, name: str) -> bool:
        asked = "UPDATE responses SET expires = ? WHERE id = ? AND owner = ? AND expires > ?"
        with self._change():
            return self._base.execute(asked, (LONG_AGO, name, owner, time.time())).rowcount > 0

    def _empty_log(self) -> None:
        """Write what is in the log to the database, as far as there is room, and give its space back."""
        with self._lock, suppress(sqlite3.Error):
            self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._base.close()
        if self._servers is not None:
            self._servers.close()


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII alone: any text can be stored, and its length is in bytes
