"""A server that answers as the Hugging Face hub does for one repository: its list of files, and the files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(BaseHTTPRequestHandler):
    """One request; the server knows what it has."""

    server: HubServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:  # the library's name
        self.do_GET()

    def do_GET(self) -> None:
        path, repository = self.path.partition("?")[0], self.server.repository
        file = self.server.folder / re.sub(r"^.*/resolve/[^/]*/", "", path)
        if path.startswith(f"/api/models/{repository}"):
            self.answer(json.dumps(self.server.listing(tree="/tree/" in path)).encode(), "application/json")
        elif path.startswith(f"/{repository}/resolve/") and file.is_file():
            if self.command == "GET" and file.suffix == ".safetensors" and self.server.stuck is not None:
                self.server.stuck.wait(60)
            self.answer(file.read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


class HubServer(ThreadingHTTPServer):
    """Has the files of a folder as a repository."""

    daemon_threads = True

    def __init__(self, repository: str, folder: Path, stuck: Event | None) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.repository, self.folder, self.stuck = repository, folder, stuck

    def listing(self, *, tree: bool) -> Any:
        every = [file for file in sorted(self.folder.rglob("*")) if file.is_file()]
        files = [(file.relative_to(self.folder).as_posix(), file.stat().st_size) for file in every]
        if tree:
            return [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files]
        siblings = [{"rfilename": name, "size": size} for name, size in files]
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings, "private": False, "disabled": False}


@contextmanager
def serve(repository: str, folder: Path, *, stuck: Event | None = None) -> Iterator[str]:
    """The address of a hub that has the files of `folder` as `repository`.

    Args:
        stuck: weights are sent when this is set.
    """
    server = HubServer(repository, folder, stuck)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        if stuck is not None:
            stuck.set()
        server.shutdown()
        server.server_close()


def ask(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let huggingface_hub, which reads its environment once, ask this hub and keep what comes in a folder."""
    changed = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in changed.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
