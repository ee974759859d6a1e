"""`/v1/files` and `/v1/batches`, where the server was started with a folder for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from paceline.config import KeyLimits, ServerConfig
from paceline.serving.api_errors import ApiError
from paceline.serving.batch_runs import BatchRuns
from paceline.serving.batch_store import BatchStore, Json, page_of
from paceline.serving.keys import NO_LIMITS
from paceline.serving.limits import FILES
from paceline.serving.protocol import Body
from paceline.serving.runs import json_response, large_response
from paceline.utils import shortened

BATCHES: Final = "/v1/batches"

MAX_OPEN: Final = 16
"""So many batches of a key may run or wait at once."""

MAX_NAME: Final = 256
"""A file's name is cut off after so many characters."""

NO_FOLDER: Final = (
    "this server keeps no files and runs no batches; its operator may start it with --batch-folder FOLDER"
)


class BatchBody(Body):
    """Is the body of `/v1/batches`. The window says nothing here: a batch runs until it has ended."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


class BatchRoutes:
    """Handles the routes of files and batches.

    Args:
        store: None where there is no folder.
        runs: likewise.
        limits: of owners that have some of their own.
    """

    def __init__(
        self, store: BatchStore | None, runs: BatchRuns | None, config: ServerConfig, limits: Mapping[str, KeyLimits]
    ) -> None:
        self._kept, self._running, self._most, self._limits = store, runs, config.max_batch_file_bytes, limits

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("POST", FILES, self.upload),
            ("GET", FILES, self.list_files),
            ("GET", f"{FILES}/{{name}}", self.retrieve_file),
            ("GET", f"{FILES}/{{name}}/content", self.content),
            ("DELETE", f"{FILES}/{{name}}", self.delete_file),
            ("POST", BATCHES, self.create),
            ("GET", BATCHES, self.list_batches),
            ("GET", f"{BATCHES}/{{name}}", self.retrieve),
            ("POST", f"{BATCHES}/{{name}}/cancel", self.cancel),
        )
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)

    @property
    def _store(self) -> BatchStore:
        if self._kept is None:
            raise ApiError(NO_FOLDER, status=404, code="no_batch_folder")
        return self._kept

    @property
    def _runs(self) -> BatchRuns:
        if self._running is None:
            raise ApiError(NO_FOLDER, status=404, code="no_batch_folder")
        return self._running

    async def upload(self, http: Request) -> Response:
        """Keep a file of requests."""
        store, owner = self._store, http.scope["owner"]
        most_together = self._limits.get(owner, NO_LIMITS).max_file_bytes
        try:
            async with http.form(max_files=1, max_fields=8) as form:
                file = _uploaded(form)
                filename = (file.filename or "file.jsonl")[:MAX_NAME]
                told = await asyncio.to_thread(store.add_file, owner, filename, file.file, self._most, most_together)
        except ClientDisconnect:
            raise ApiError("the body did not arrive") from None
        return json_response(told)

    async def list_files(self, http: Request) -> Response:
        found, purpose = self._store.files(http.scope["owner"]), http.query_params.get("purpose")
        found = [file for file in found if purpose in (None, file["purpose"])]
        return await large_response(_page(http, found, ("after", "limit", "order", "purpose"), 10_000))

    async def retrieve_file(self, name: str, http: Request) -> Response:
        return json_response(self._store.file(http.scope["owner"], name))

    async def content(self, name: str, http: Request) -> Response:
        """Answer with what is in a file."""
        store = self._store
        told = store.file(http.scope["owner"], name)
        return FileResponse(store.path(name), media_type="application/jsonl", filename=told["filename"])

    async def delete_file(self, name: str, http: Request) -> Response:
        await asyncio.to_thread(self._store.delete_file, http.scope["owner"], name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def create(self, request: BatchBody, http: Request) -> Response:
        """Begin a batch over an uploaded file."""
        store, owner = self._store, http.scope["owner"]
        if store.file(owner, request.input_file_id, "input_file_id")["purpose"] != "batch":
            raise ApiError("input_file_id must be of a file with the purpose batch", param="input_file_id")
        if sum(record["owner"] == owner for record in store.unfinished()) >= MAX_OPEN:
            why = f"{MAX_OPEN} batches of this key have not ended; try again later"
            raise ApiError(why, status=429, code="too_many_batches", headers={"Retry-After": "60"})
        told = {
            "object": "batch",
            **request.model_dump(),
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "expires_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        record = await asyncio.to_thread(store.add_batch, owner, told)
        answer = json_response(record["told"])
        self._runs.begin(record)
        return answer

    async def list_batches(self, http: Request) -> Response:
        found = self._store.batches(http.scope["owner"])
        return await large_response(_page(http, found, ("after", "limit"), 100))

    async def retrieve(self, name: str, http: Request) -> Response:
        return json_response(self._store.batch(http.scope["owner"], name)["told"])

    async def cancel(self, name: str, http: Request) -> Response:
        """Let a batch end with the answers that it has."""
        record = self._store.batch(http.scope["owner"], name)
        if not await self._runs.cancel(record):
            status = record["told"]["status"]
            raise ApiError(f"the batch {name} is {status}; only what runs can be cancelled", status=409,
                           param="batch_id", code="batch_not_running")  # fmt: skip
        return json_response(record["told"])


def _uploaded(form: FormData) -> UploadFile:
    """Return the file of a form.

    Raises:
        ApiError: it holds something else, or is not for a batch.
    """
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(f"{name[:64]} is not supported; leave it out", param=name, code="unsupported_field")
    file, purpose = form.get("file"), form.get("purpose")
    if purpose != "batch":
        given = "nothing" if purpose is None else shortened(str(purpose))
        raise ApiError(f"purpose must be batch, got {given}", param="purpose")
    if not isinstance(file, UploadFile):
        raise ApiError("file must be a file", param="file")
    return file


def _page(http: Request, items: list[Json], names: tuple[str, ...], most: int) -> Json:
    """Return the page of a list that the query of a request asks for.

    Args:
        names: that the query may have.
        most: items of a page.
    Raises:
        ApiError: a wrong query.
    """
    asked = http.query_params
    for name in asked:
        if name not in names:
            raise ApiError(f"{name} is not supported; leave it out", param=name, code="unsupported_field")
    limit, order = asked.get("limit", str(min(20, most))), asked.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 5 or not 1 <= int(limit) <= most:
        raise ApiError(f"limit must be in 1..{most}, got {shortened(limit)}", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(f"order must be asc or desc, got {shortened(order)}", param="order")
    return page_of(items, limit=int(limit), order=order, after=asked.get("after"))
