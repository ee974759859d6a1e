"""Files that clients upload and batches of requests over them, in a folder: each key has its own, and all of them
survive the server.

A record is a JSON file that is replaced as a whole. What is in a file is on the disk before there is a record of it;
what a crash leaves without one is removed at the next start.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final

from filelock import FileLock, Timeout

from paceline.errors import ConfigError
from paceline.serving.api_errors import ApiError
from paceline.utils import replacing, shortened

Json = dict[str, Any]

MAX_FILES: Final = 1000
"""So many files may a key have."""

OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""A batch with one of these states has not ended."""

PIECE: Final = 2**20


class BatchStore:
    """Keeps files and batches. Calls block and may come from any thread.

    Args:
        folder: made where it is missing; no other process may use it.
    Raises:
        ConfigError: it cannot be used, or is in use.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        self._files, self._batches, self._change = dict[str, Json](), dict[str, Json](), Lock()
        try:
            for path in (self._folder, self._folder / "files", self._folder / "batches"):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = FileLock(self._folder / "lock", blocking=False, thread_local=False)
            self._lock.acquire()
        except Timeout:
            raise ConfigError(f"batch_folder {folder!r} is used by another server; name another folder") from None
        except OSError as error:
            raise ConfigError(f"batch_folder must be a folder that can be written, got {folder!r} ({error})") from None
        try:
            self._files = self._records("files")
            self._batches = self._records("batches")
            self._clean()
        except (OSError, ValueError, LookupError) as error:
            self._lock.release()
            raise ConfigError(f"batch_folder {folder!r} holds what is no record of batches ({error})") from None

    def _records(self, kind: str) -> dict[str, Json]:
        paths = sorted((self._folder / kind).glob("*.json"))
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return {record["told"]["id"]: record for record in sorted(records, key=lambda record: record["number"])}

    def _clean(self) -> None:
        """Remove contents that no record is of, but those that a batch still writes."""
        written = {name for batch in self.unfinished() for name in (batch["output"], batch["failures"])}
        for path in (self._folder / "files").glob("file-*.jsonl*"):
            if path.name.partition(".")[0] not in self._files.keys() | written:
                path.unlink()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.release()

    def path(self, name: str) -> Path:
        """Return where the content of a file is."""
        return self._folder / "files" / f"{name}.jsonl"

    def add_file(self, owner: str, filename: str, content: IO[bytes], most: int, most_together: int | None) -> Json:
        """Keep an uploaded file.

        Args:
            most: bytes that it may have.
            most_together: bytes that all files of the owner may have; None for any number.
        Raises:
            ApiError: it is empty or too long, there are too many, or it cannot be written.
        """
        if sum(record["owner"] == owner for record in self._files.values()) >= MAX_FILES:
            raise ApiError(f"a key may have {MAX_FILES} files; delete some", status=413, code="too_many_files")
        name, size = f"file-{secrets.token_hex(12)}", 0
        try:
            with self.path(name).open("xb") as stream:
                while piece := content.read(PIECE):
                    size += len(piece)
                    if size > most:
                        raise ApiError(f"file must be at most {most} bytes long", status=413, param="file")
                    stream.write(piece)
                stream.flush()
                os.fsync(stream.fileno())
            if not size:
                raise ApiError("file must hold requests, got an empty one", param="file")
            with self._change:
                self._check_bytes(owner, size, most_together)
                return self._new_file(owner, name, filename, "batch", size)
        except ApiError:
            self.path(name).unlink()
            raise
        except OSError as error:
            self.path(name).unlink(missing_ok=True)
            raise ApiError(f"the file cannot be kept ({error.strerror})", status=500, code="store_failed") from None

    def _check_bytes(self, owner: str, size: int, most: int | None) -> None:
        """Check that an owner may have another file of this size.

        Raises:
            ApiError: all files of this owner would have more than `most` bytes together.
        """
        kept = sum(file["bytes"] for file in self.files(owner))
        if most is not None and kept + size > most:
            why = f"all files of a key together (max_file_bytes) must be at most {most} bytes long, and are {kept}"
            raise ApiError(f"{why} without this one of {size}; delete some", status=413, param="file",
                           code="too_many_file_bytes")  # fmt: skip

    def publish(self, owner: str, name: str, filename: str) -> str | None:
        """Make what a batch has written a file of its owner; returns its id, or None where nothing was written."""
        path = self.path(name)
        if not path.exists() or not (size := path.stat().st_size):
            return None
        self._new_file(owner, name, filename, "batch_output", size)
        return name

    def _new_file(self, owner: str, name: str, filename: str, purpose: str, size: int) -> Json:
        told = {
            "id": name,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "expires_at": None,
        }
        self._files[name] = self._written("files", {"owner": owner, "number": time.time_ns(), "told": told})
        return told

    def _written(self, kind: str, record: Json) -> Json:
        """Put a record on the disk.

        Raises:
            ApiError: it cannot be written.
        """
        path = self._folder / kind / f"{record['told']['id']}.json"
        try:
            with replacing(path) as draft:
                draft.write_text(json.dumps(record), encoding="utf-8")
        except ConfigError as error:
            raise ApiError(str(error), status=500, code="store_failed") from None
        return record

    def file(self, owner: str, name: str, param: str = "file_id") -> Json:
        """Return what is told of a file.

        Raises:
            ApiError: this owner has none of this name.
        """
        told: Json = _of_owner(self._files, owner, name, param)["told"]
        return told

    def files(self, owner: str) -> list[Json]:
        """Return what is told of all files of an owner, the oldest first."""
        return [record["told"] for record in list(self._files.values()) if record["owner"] == owner]

    def delete_file(self, owner: str, name: str) -> None:
        """Forget a file.

        Raises:
            ApiError: there is none, or a batch needs it.
        """
        self.file(owner, name)
        for batch in self.unfinished():
            if batch["told"]["input_file_id"] == name:
                why = f"the batch {batch['told']['id']} reads this file; cancel it first"
                raise ApiError(why, status=409, param="file_id")
        (self._folder / "files" / f"{name}.json").unlink()
        self.path(name).unlink(missing_ok=True)
        del self._files[name]

    def add_batch(self, owner: str, told: Json) -> Json:
        """Keep a new batch, and return its record: whose it is, what is told of it, and the ids of the files that its
        answers and failures go to.
        """
        told = {"id": f"batch_{secrets.token_hex(12)}", **told}
        record = {"owner": owner, "number": time.time_ns(), "told": told}
        record |= {"output": f"file-{secrets.token_hex(12)}", "failures": f"file-{secrets.token_hex(12)}"}
        self._batches[told["id"]] = self._written("batches", record)
        return record

    def change_batch(self, record: Json, **changes: Any) -> None:
        """Keep what has changed of what is told of a batch."""
        with self._change:
            record["told"] |= changes
            self._written("batches", record)

    def cancel_batch(self, record: Json) -> bool:
        """Note that a batch is to end; returns whether it had not yet."""
        with self._change:
            if record["told"]["status"] not in ("validating", "in_progress"):
                return False
            record["told"] |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._written("batches", record)
            return True

    def batch(self, owner: str, name: str) -> Json:
        """Return the record of a batch.

        Raises:
            ApiError: this owner has none of this name.
        """
        return _of_owner(self._batches, owner, name, "batch_id")

    def batches(self, owner: str) -> list[Json]:
        """Return what is told of all batches of an owner, the oldest first."""
        return [record["told"] for record in list(self._batches.values()) if record["owner"] == owner]

    def unfinished(self) -> list[Json]:
        """Return the records of all batches that have not ended."""
        return [record for record in list(self._batches.values()) if record["told"]["status"] in OPEN]


def _of_owner(records: Mapping[str, Json], owner: str, name: str, param: str) -> Json:
    record = records.get(name)
    if record is None or record["owner"] != owner:
        raise ApiError(f"there is no {shortened(name)}", status=404, param=param, code="not_found")
    return record


def page_of(items: list[Json], *, limit: int, order: str, after: str | None) -> Json:
    """Return a page of a list whose oldest are first.

    Args:
        after: an id; the page begins behind it.
    Raises:
        ApiError: no such id is in it.
    """
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(f"after must be an id of the list, got {shortened(after)}", param="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    ends: Iterator[str | None] = iter((data[0]["id"], data[-1]["id"])) if data else iter((None, None))
    return {
        "object": "list",
        "data": data,
        "first_id": next(ends),
        "last_id": next(ends),
        "has_more": len(items) > len(data),
    }
