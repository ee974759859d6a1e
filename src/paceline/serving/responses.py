"""`/v1/responses` after the Open Responses specification: answers of chats as items and semantic events, and the routes
that store them, show them again, cancel and delete them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message

from paceline.serving.api_errors import ApiError
from paceline.serving.chat import is_json
from paceline.serving.compaction import Compaction, CompactRequest
from paceline.serving.entrance import COMPACT
from paceline.serving.protocol import ChatRequest
from paceline.serving.response_items import new_id
from paceline.serving.response_request import CHAT_NAMES, ResponseRequest, response_usage
from paceline.serving.response_store import RUNNING, ResponseStore, Stored
from paceline.serving.runs import Json, RequestRun, json_response, large_response
from paceline.serving.sealed import sealed
from paceline.serving.translation import ChatHandler, ChatPiece, Translation
from paceline.utils import shortened

CANCELLED: Final = "cancelled"

PATIENCE: Final = 10.0
"""A cancelled response is waited for so many seconds."""


class ResponseTranslation(Translation):
    """Tells a chat as a response, and stores it.

    Args:
        items: what it is made from, earlier turns first.
    Attributes:
        over: set when it has ended, and been stored if it is to be and can be.
        begun: set when it can be asked for.
    """

    last = b"data: [DONE]\n\n"

    def __init__(
        self, run: RequestRun, request: ResponseRequest, items: list[Json], owner: str, routes: ResponseRoutes
    ):
        super().__init__(run, stream=bool(request.stream))
        self.request, self._items, self._owner, self._routes = request, items, owner, routes
        self.id, self._created, self._sent = new_id("resp"), int(time.time()), 0
        self._output: list[Json] = []
        self._text: list[str] = []
        self._chat_logprobs: list[Json] = []
        self._logprobs: list[Json] = []
        self._ended: Json = {"status": RUNNING}
        self._unstored: Json = {}
        self.over, self.begun = asyncio.Event(), asyncio.Event()

    def body(self) -> Json:
        params = self.run.reply.jobs[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.run.reply.answer.model,
            "output": list(self._output),
            "usage": self._usage(),
            **self.request.shown(),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "background": self.request.background is True,
            "service_tier": "default",
            **self._ended,
            **self._unstored,
        }

    def _usage(self) -> Json | None:
        """Return the counts of tokens, in the words of this API; None before the end."""
        chat = self.run.usage
        if self._ended["status"] == RUNNING or not chat["prompt_tokens"]:
            return None
        return response_usage(chat, self.thoughts)

    def _event(self, kind: str, **more: Any) -> Json:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **more}

    def _at(self, kind: str, **more: Any) -> Json:
        """Return an event of the last item."""
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **more)

    def begin(self) -> Iterator[Json]:
        self._routes.running[self._owner, self.id] = self
        self.begun.set()
        yield self._event("created", response=self.body())
        yield self._event("in_progress", response=self.body())

    def extra(self, choice: Json) -> None:
        self._chat_logprobs += (choice.get("logprobs") or {}).get("content") or ()
        if "schema_errors" in choice:
            self._ended["schema_errors"] = choice["schema_errors"]

    def open(self, piece: ChatPiece) -> Iterator[Json]:
        item: Json = {"status": "in_progress"}
        if piece.block == "thinking":
            item |= {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        elif piece.block == "text":
            item |= {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            item |= {"id": new_id("fc"), "type": "function_call", "call_id": piece.call[0], "name": piece.call[1]}
            item["arguments"] = ""
        self._output.append(item)
        self._text, self._logprobs = [], []
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=dict(item))
        if "content" in item:
            yield self._at("content_part.added", content_index=0, part=self._part())

    def _part(self) -> Json:
        text = "".join(self._text)
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def add(self, piece: ChatPiece) -> Iterator[Json]:
        self._text.append(piece.text)
        fresh, self._chat_logprobs = self._chat_logprobs, []
        if piece.block == "thinking":
            yield self._at("reasoning_text.delta", content_index=0, delta=piece.text)
        elif piece.block == "text":
            self._logprobs += fresh
            yield self._at("output_text.delta", content_index=0, delta=piece.text, logprobs=fresh)
        else:
            yield self._at("function_call_arguments.delta", delta=piece.text)

    def shut(self) -> Iterator[Json]:
        item, text = self._output[-1], "".join(self._text)
        item["status"] = "incomplete" if self.reason == "length" else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            item["status"] = item["status"] if is_json(text) else "incomplete"
            yield self._at("function_call_arguments.done", arguments=text)
        else:
            item["content"] = [self._part()]
            if item["type"] == "reasoning":
                item |= {"encrypted_content": sealed(text)} if self.request.seals else {}
                yield self._at("reasoning_text.done", content_index=0, text=text)
            else:
                yield self._at("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._at("content_part.done", content_index=0, part=self._part())
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=dict(item))

    async def end(self) -> list[Json]:
        events = []
        if not self._output:
            events = [*self.open(ChatPiece("text", "")), *self.shut()]
        if self.reason == "length":
            self._ended |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self._ended |= {"status": "completed", "completed_at": int(time.time())}
        await self._keep()
        return [*events, self._event(self._ended["status"], response=self.body())]

    async def fail(self, error: ApiError) -> list[Json]:
        self.reason = "length"  # what is open is incomplete
        events = list(self.close())
        cancelled = error.code == CANCELLED
        self._ended |= {
            "status": CANCELLED if cancelled else "failed",
            "completed_at": None,
            "incomplete_details": None,
        }
        if not cancelled:
            self._ended["error"] = {"code": "server_error", "message": error.message}
        await self._keep()
        return [*events, self._event("incomplete" if cancelled else "failed", response=self.body())]

    async def _keep(self) -> None:
        """Store it, if it is to be; what cannot be stored is answered all the same, and says so."""
        try:
            if self.request.stored:
                await asyncio.to_thread(self._routes.store.put, self._owner, self.body(), self._items)
        except ApiError as error:
            self._unstored = {"store": False, "store_error": error.message}
        self.over.set()

    async def keep_beginning(self) -> None:
        """Store that it has begun, so that it does not vanish with the server.

        Raises:
            ApiError: it cannot be stored, and is ended.
        """
        try:
            await asyncio.to_thread(self._routes.store.begin, self._owner, self.body(), self._items)
        except ApiError as error:
            self.run.stop(error)
            raise

    async def _gathered(self) -> Json:
        try:
            return await super()._gathered()
        except ApiError as error:
            if error.code != CANCELLED and not self.request.background:
                raise
            await self.fail(error)
            return self.body()

    def forget(self) -> None:
        self.begun.set()
        self._routes.running.pop((self._owner, self.id), None)
        self.over.set()


class ResponseRoutes:
    """Handles the routes of responses.

    Attributes:
        running: responses that have begun, by owner and id.

    Args:
        most_new: how many tokens an answer of an owner may have; None for any number.
    """

    def __init__(self, chat: ChatHandler, store: ResponseStore, most_new: Callable[[str], int | None]) -> None:
        self._chat, self.store, self._most_new = chat, store, most_new
        self.running: dict[tuple[str, str], ResponseTranslation] = {}
        self._background: set[asyncio.Task[Response]] = set()

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        stored_path = "/v1/responses/{name}"
        for method, path, handler in (
            ("POST", "/v1/responses", self.create),
            ("POST", COMPACT, self.compact),
            ("GET", stored_path, self.retrieve),
            ("DELETE", stored_path, self.delete),
            ("POST", f"{stored_path}/cancel", self.cancel),
            ("GET", f"{stored_path}/input_items", self.input_items),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)

    async def create(self, request: ResponseRequest, http: Request) -> Response:
        """Answer a request, which may go on from a stored response."""
        request.check_background()
        if request.background and http.scope.get("batched"):
            raise ApiError("background must be left out of a batch, which waits for its answers", param="background")
        owner, earlier = http.scope["owner"], await self._earlier(http, request.previous_response_id)
        items, chat = await asyncio.to_thread(request.asked, earlier)
        if request.stored and not await asyncio.to_thread(self.store.holds, items):
            raise ApiError(f"store: the input is longer than the {self.store.most} bytes that this server stores; "
                           "use store: false", status=413, param="store")  # fmt: skip
        try:
            if request.background:
                return await self._detached(
                    chat, http, lambda run: ResponseTranslation(run, request, items, owner, self)
                )
            return await self._chat(chat, http, lambda run: ResponseTranslation(run, request, items, owner, self))
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None

    async def _detached(
        self, chat: ChatRequest, http: Request, made: Callable[[RequestRun], ResponseTranslation]
    ) -> Response:
        """Begin a response that goes on when its client is gone, and answer with what it is at its beginning.

        Raises:
            ApiError: it cannot begin.
        """
        translation: asyncio.Future[ResponseTranslation] = asyncio.get_running_loop().create_future()

        def told(run: RequestRun) -> ResponseTranslation:
            translation.set_result(made(run))
            return translation.result()

        task = asyncio.create_task(self._chat(chat, Request(http.scope, _nothing_comes), told))
        self._background.add(task)
        http.scope["goes_on"] = task
        task.add_done_callback(self._background.discard)
        waited: set[asyncio.Future[Any]] = {task, translation}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not translation.done():
            translation.cancel()
            return task.result()
        live = translation.result()
        await live.begun.wait()
        await live.keep_beginning()
        return await large_response(live.body())

    async def close(self) -> None:
        """End what runs in the background, and keep it as failed."""
        for live in list(self.running.values()):
            if live.request.background:
                live.run.stop(ApiError("the server was shut down before the answer was complete", status=503))
        await asyncio.gather(*self._background, return_exceptions=True)

    async def compact(self, request: CompactRequest, http: Request) -> Response:
        """Answer with what the user said in a conversation, and a summary of the whole."""
        earlier = await self._earlier(http, request.previous_response_id)
        items, chat = await asyncio.to_thread(request.asked, earlier, self._most_new(http.scope["owner"]))
        try:
            return await self._chat(chat, http, lambda run: Compaction(run, items))
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None

    async def _earlier(self, http: Request, previous: str | None) -> list[Json]:
        """Return the items of the turns that end with a stored response; none without one."""
        if previous is None:
            return []
        stored = await self._found(previous, http)
        if stored is None:
            raise _missing(previous, param="previous_response_id", code="previous_response_not_found")
        if stored.running:
            why = f"the response {shortened(previous)} has not ended; go on from it when it has"
            raise ApiError(why, param="previous_response_id", code="response_running")
        return stored.input + list[Json](stored.response["output"])

    async def retrieve(self, name: str, http: Request) -> Response:
        """Answer with a response that runs or is stored."""
        _only(http, ())
        live = self.running.get((http.scope["owner"], name))
        if live is not None and live.request.stored and not live.over.is_set():
            return await large_response(live.body())
        return await large_response((await self._stored(name, http)).response)

    async def cancel(self, name: str, http: Request) -> Response:
        """End a response that runs, and answer with what it has."""
        live = self.running.get((http.scope["owner"], name))
        if live is not None:
            live.run.stop(ApiError("the response was cancelled", code=CANCELLED))
            with suppress(TimeoutError):  # of a client that does not read its stream
                await asyncio.wait_for(live.over.wait(), PATIENCE)
            return await large_response(live.body())
        stored = await self._stored(name, http)
        response = stored.response
        if stored.running:
            raise _elsewhere(name)
        if response["status"] != CANCELLED:
            why = f"the response {name!r} has ended ({response['status']}); only what runs can be cancelled"
            raise ApiError(why, param="response_id", code="response_not_running")
        return await large_response(response)

    async def delete(self, name: str, http: Request) -> Response:
        """Forget a stored response."""
        owner = http.scope["owner"]
        if (owner, name) in self.running and not self.running[owner, name].over.is_set():
            raise ApiError(f"the response {name!r} is running; cancel it first", status=409, param="response_id")
        if (await self._stored(name, http)).running:
            raise _elsewhere(name)
        if not await asyncio.to_thread(self.store.delete, owner, name):
            raise _missing(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, name: str, http: Request) -> Response:
        """Answer with a page of the items that a stored response was made from."""
        _only(http, ("after", "limit", "order"))
        asked = http.query_params
        limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise ApiError(f"limit must be in 1..100, got {shortened(limit)}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(f"order must be asc or desc, got {shortened(order)}", param="order")
        items = (await self._stored(name, http)).input
        items = items if order == "asc" else items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(f"after must be the id of an item, got {shortened(after)}", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        more = len(items) > len(page)
        told = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
        return await large_response(told)

    async def _stored(self, name: str, http: Request) -> Stored:
        """Return a stored response. Of replicas, the one that answers it is the only one that tells of it meanwhile.

        Raises:
            ApiError: there is none.
        """
        stored = await self._found(name, http)
        if stored is None or (stored.running and http.scope.get("relayed")):
            raise _missing(name)
        return stored

    async def _found(self, name: str, http: Request) -> Stored | None:
        """Return a stored response of the owner of a request; None where there is none."""
        owner = http.scope["owner"]
        return await asyncio.to_thread(self.store.get, owner, name, running=(owner, name) in self.running)


async def _nothing_comes() -> Message:
    """Receive for a request whose client is not waited for."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


def _missing(name: str, param: str = "response_id", code: str = "response_not_found") -> ApiError:
    return ApiError(f"no response {shortened(name)} is stored here", status=404, param=param, code=code)


def _elsewhere(name: str) -> ApiError:
    why = f"the response {name!r} runs in another server, which shares the file of responses; cancel it there"
    return ApiError(why, status=409, param="response_id", code="response_elsewhere")


def _only(http: Request, names: Sequence[str]) -> None:
    for name in http.query_params:
        if name not in names:
            raise ApiError(f"{name} is not supported; leave it out", param=name, code="unsupported_field")
