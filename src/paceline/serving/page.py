"""The live page, and what it is told: what the engine does at present, while somebody looks.

The page asks once a second. The engine is watched from the first question until nobody has asked for `LOOKED` seconds;
then the watcher leaves, and nothing is counted or kept. All that is kept has a bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, Final, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response

from paceline.async_llm import AsyncLLM
from paceline.config import LOOPBACK, ServerConfig
from paceline.engine import Engine, StepRecord
from paceline.explain import PAGES, plain_step
from paceline.serving.keys import ADMIN, read_keys
from paceline.serving.limits import PAGE_FILES, Slots, owner_of
from paceline.serving.runs import json_response
from paceline.tree import PROBE, Verdict
from paceline.version import __version__

logger = logging.getLogger("paceline.serving")

LOOKED: Final = 5.0
"""So many seconds after a question the engine is still watched."""

TREE_EVERY: Final = 0.2
LAST_EVERY: Final = 0.05
"""Seconds between two trees, and before the last one of a request."""

TREE_SHARE: Final = 0.02
"""Trees may take this share of the engine's time."""

POSITIONS: Final = 16
"""So many positions of drafts are told apart."""

MOST_TREES: Final = 16
MOST_WANTED: Final = 16
"""So many requests are followed at a time for a viewer."""

MOST_REQUESTS: Final = 32
"""So many requests are listed."""

MOST_SUMS: Final = 128
"""Of so many requests the sums are kept, those that had a step last."""

MOST_NODES: Final = 128
MOST_TEXT: Final = 64
"""So many characters of a token are shown."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES: Final = Path(__file__).parent / "pages"
TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

Json = dict[str, Any]


def sees(viewer: str, owner: str) -> bool:
    """Tell whether somebody may know of a request."""
    return viewer in (ADMIN, owner)


@dataclass(slots=True)
class DrafterCounts:
    """Counts one drafter's share.

    Attributes:
        asked: steps in which it looked for drafts.
        proposed, verified, accepted: its nodes.
        tried, reached: by position in the draft, steps with a node there that was verified, and that was accepted.
    """

    asked: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    tried: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    reached: list[int] = field(default_factory=lambda: [0] * POSITIONS)

    def to_dict(self) -> Json:
        return {
            "asked": self.asked,
            "proposed": self.proposed,
            "verified": self.verified,
            "accepted": self.accepted,
            "tried": [*self.tried],
            "reached": [*self.reached],
        }


@dataclass(slots=True)
class Sums:
    """Sums up steps: of one request, or of all that one viewer may see.

    Attributes:
        tokens: that came of the steps.
        seconds: that the steps took.
        priced_tokens, priced_seconds, plain_seconds: of steps whose plain time is known, tokens and seconds, and the
            seconds that plain decoding of the same requests would have taken for these tokens.
        checks: steps in which drafts were scored and whose plain time is known.
        check_tokens, check_seconds: tokens of one sequence that came of `checks`, and seconds that these took.
        check_plain: seconds that as many steps without drafts would have taken.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    priced_tokens: int = 0
    priced_seconds: float = 0.0
    plain_seconds: float = 0.0
    checks: int = 0
    check_tokens: float = 0.0
    check_seconds: float = 0.0
    check_plain: float = 0.0

    def add(self, record: StepRecord, mine: Sequence[int], plain: float | None) -> None:
        """Count a step.

        Args:
            mine: the numbers of the sequences that are counted, at least one.
            plain: seconds that the step would have taken without drafts; None where that is not known.
        """
        tokens = sum(kept_tokens(record, index) for index in mine)
        self.steps += 1
        self.tokens += tokens
        self.seconds += record.times.total
        if plain is None:
            return
        self.priced_tokens += tokens
        self.priced_seconds += record.times.total
        self.plain_seconds += plain * tokens / len(mine)
        if any(map(len, record.trees)):
            self.checks += 1
            self.check_tokens += tokens / len(mine)
            self.check_seconds += record.times.total
            self.check_plain += plain

    def to_dict(self) -> Json:
        return {name.name: getattr(self, name.name) for name in fields(Sums)}


@dataclass(slots=True)
class Counts(Sums):
    """Sums up the steps of what one viewer may see, with the drafters' shares.

    Attributes:
        began: tells these sums from earlier ones.
    """

    began: float = field(default_factory=monotonic)
    expires: float = 0.0
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)

    def add(self, record: StepRecord, mine: Sequence[int], plain: float | None) -> None:
        """Count a step, and what each drafter did in it."""
        Sums.add(self, record, mine, plain)
        for name, seconds in zip(record.drafters, record.draft_seconds, strict=True):
            self.drafters.setdefault(name, DrafterCounts()).asked += seconds > 0.0
        for index in mine:
            self._add_tree(record, index, kept_tokens(record, index))

    def _add_tree(self, record: StepRecord, index: int, kept: int) -> None:
        """Count the nodes of a sequence's tree by drafter; `kept` tokens of the step have stayed."""
        tree, verdict = record.trees[index], record.verdicts[index]
        for source in record.proposed[index].sources.tolist():
            self.drafters[record.drafters[source]].proposed += 1
        if not len(tree):
            return
        path = set(verdict.path[:kept]) if isinstance(verdict, Verdict) else set()
        columns = zip(tree.sources.tolist(), tree.depths.tolist(), tree.kinds.tolist(), strict=True)
        tried, reached = set[tuple[int, int]](), set[tuple[int, int]]()
        for node, (source, depth, kind) in enumerate(columns):
            if kind == PROBE:
                continue
            counts = self.drafters[record.drafters[source]]
            counts.verified += 1
            counts.accepted += node in path
            if depth <= POSITIONS:
                tried.add((source, depth))
                if node in path:
                    reached.add((source, depth))
        for source, depth in tried:
            self.drafters[record.drafters[source]].tried[depth - 1] += 1
        for source, depth in reached:
            self.drafters[record.drafters[source]].reached[depth - 1] += 1

    def to_dict(self) -> Json:
        drafters = {name: counts.to_dict() for name, counts in self.drafters.items()}
        return Sums.to_dict(self) | {"began": self.began, "drafters": drafters}


def kept_tokens(record: StepRecord, index: int) -> int:
    """Return how many tokens of a step have stayed in a sequence."""
    return len(record.sequences[index].context.tokens) - record.lengths[index]


class Look(NamedTuple):
    """What a viewer is shown.

    Attributes:
        counts: over all requests that the viewer may know of.
        tree: the last one whose drafts were scored, else the last one that had drafts, else the last one; None before
            there was any.
        words: the controller's own about the newest step, of which the tree need not be.
        answer: sums of one request.
    """

    counts: Json
    tree: Json | None
    words: str | None
    answer: Json | None


class Onlooker:
    """Watches the steps of an engine while somebody looks; called on the engine's thread, asked from any other."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock, self._watching = engine, Lock(), False
        self._counts: dict[str, Counts] = {}  # by viewer
        self._wanted: dict[tuple[str, str], float] = {}  # (viewer, request), with the time at which that ends
        self._sums: dict[
            str, tuple[str, Sums]
        ] = {}  # by request, with its owner; the one that had a step last at the end
        self._trees: dict[str, Json] = {}  # by request, the one that changed last at the end
        self._plain: dict[int, float] = {}  # by batch size: seconds of a step without drafts, where none else knows
        self._last = self._took = self._told = 0.0

    @property
    def watching(self) -> bool:
        return self._watching

    def look(self, viewer: str, wanted: str, answer: str = "") -> Look:
        """Return what a viewer is shown.

        Args:
            wanted: the request whose tree and plan are wanted; "" is the newest.
            answer: the request whose sums are wanted; "" is none.
        """
        now = monotonic()
        with self._lock:
            self._wanted = {key: end for key, end in self._wanted.items() if end > now}
            if sum(who == viewer for who, _ in self._wanted) < MOST_WANTED or (viewer, wanted) in self._wanted:
                self._wanted[viewer, wanted] = now + LOOKED
            counts = self._counts.setdefault(viewer, Counts())
            counts.expires = now + LOOKED
            if not self._watching:
                self._watching = True
                self._engine.watchers.append(self)
            trees = [tree for tree in reversed(self._trees.values()) if sees(viewer, tree["owner"])]
            trees = [tree for tree in trees if wanted in ("", tree["id"])]
            newest, tree = (trees[0], max(trees, key=lambda tree: tree["drafts"])) if trees else (None, None)
            owner, sums = self._sums.get(answer, ("", None))
            told = sums.to_dict() if sums is not None and sees(viewer, owner) else None
            return Look(counts.to_dict(), tree, None if newest is None else newest["words"], told)

    def __call__(self, record: StepRecord) -> None:
        """Take in a step. An error of the page ends the watching, and no request."""
        now = monotonic()
        try:
            with self._lock:
                viewers = {viewer: counts for viewer, counts in self._counts.items() if counts.expires > now}
                self._count(record, viewers)
                wanted = [key for key, end in self._wanted.items() if end > now]
            if viewers:
                self._keep_trees(record, wanted)
                return
        except Exception as error:  # of the page alone, not of the requests
            logger.warning("the live page cannot follow the engine (%s: %s)", type(error).__name__, error)
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        self._watching = False
        self._engine.watchers.remove(self)
        self._counts, self._wanted, self._trees, self._sums = {}, {}, {}, {}

    def _count(self, record: StepRecord, viewers: dict[str, Counts]) -> None:
        owners = [owner_of(sequence.request.tenant) for sequence in record.sequences]
        plain = self._plain_seconds(record)
        for viewer, counts in viewers.items():
            if mine := [index for index, owner in enumerate(owners) if sees(viewer, owner)]:
                counts.add(record, mine, plain)
        for index, owner in enumerate(owners):
            name = record.sequences[index].request.id
            _, sums = self._sums[name] = self._sums.pop(name, (owner, Sums()))
            sums.add(record, [index], plain)
        while len(self._sums) > MOST_SUMS:
            del self._sums[next(iter(self._sums))]

    def _plain_seconds(self, record: StepRecord) -> float | None:
        """Return what the step would have taken without drafts: its own time where it had none, else what the
        controller has measured, or such a step with as many sequences.
        """
        size, own = len(record.sequences), undrafted_seconds(record)
        if own is not None:
            self._plain[size] = own
            return own
        known = None
        with suppress(AttributeError):  # a plugin's controller need not have it
            known = self._engine.parts.controller.plain_seconds()
        return self._plain.get(size) if known is None else known

    def _keep_trees(self, record: StepRecord, wanted: Sequence[tuple[str, str]]) -> None:
        """Keep the trees of the requests that are wanted, as often as their share of the time allows.

        One with drafts stays until there is another: of steps without drafts only what was decided is kept.
        """
        latest = {request_id: place for place, request_id in enumerate(self._trees, 1)}
        followed = {index for key in wanted for index in self._found(record, *key)}
        for index in sorted(followed, key=lambda index: latest.get(record.sequences[index].request.id, 0)):
            kept = self._trees.get(record.sequences[index].request.id)
            better = kept is None or drafts_in(record, index) >= kept["drafts"]
            if not (better and self._keep_tree(record, index)) and kept is not None:
                self._keep_words(record, index, kept)

    def _keep_tree(self, record: StepRecord, index: int) -> bool:
        """Keep a sequence's tree, if its time has come; tell whether it had."""
        sequence = record.sequences[index]
        ended = sequence.output.finish_reason is not None
        wait = max(LAST_EVERY if ended else TREE_EVERY, self._took / TREE_SHARE)
        start = monotonic()
        if start - self._last < wait:
            return False
        step, _ = plain_step(record, index, {}, self._engine.parts.controller.explain(index))
        tokens = len(sequence.output.token_ids)
        self._keep(
            {
                "id": sequence.request.id,
                "owner": owner_of(sequence.request.tenant),
                "at": tokens,
                "tokens": tokens,
                "ended": ended,
                "drafts": drafts_in(record, index),
                "drafters": list(record.drafters),
                "words": step["words"],
                "step": clipped_step(step),
            }
        )
        self._last = monotonic()
        self._took = self._last - start
        return True

    def _keep_words(self, record: StepRecord, index: int, kept: Json) -> None:
        """Bring up to date how far a request is and what the controller says of it; its tree stays as it was."""
        sequence, now = record.sequences[index], monotonic()
        ended = sequence.output.finish_reason is not None
        if now - self._told < TREE_EVERY and not ended:
            return
        words = self._engine.parts.controller.explain(index)
        more = {"tokens": len(sequence.output.token_ids), "ended": ended, "words": words}
        self._keep(kept | more)
        self._told = monotonic()

    def _keep(self, tree: Json) -> None:
        with self._lock:
            self._trees.pop(tree["id"], None)
            self._trees[tree["id"]] = tree
            while len(self._trees) > MOST_TREES:
                del self._trees[next(iter(self._trees))]

    def _found(self, record: StepRecord, viewer: str, wanted: str) -> Iterator[int]:
        """Yield the index of the last sequence that a viewer wants to see, if there is one."""
        for index in reversed(range(len(record.sequences))):
            request = record.sequences[index].request
            if wanted in ("", request.id) and sees(viewer, owner_of(request.tenant)):
                yield index
                return


def undrafted_seconds(record: StepRecord) -> float | None:
    """Return how long a step without drafts took, but for drafters that looked for some; None for one with drafts."""
    return None if any(map(len, record.proposed)) else record.times.total - record.times.draft


def drafts_in(record: StepRecord, index: int) -> int:
    """Return 2 where drafts of a sequence were scored, 1 where there were some that were all cut, and 0 where none."""
    return (len(record.proposed[index]) > 0) + (len(record.trees[index]) > 0)


def clipped_step(step: Json) -> Json:
    """Return a step with at most `MOST_NODES` nodes beside the accepted ones; what a page does not draw is left out."""
    at: dict[int, int] = {-1: -1}
    nodes: list[Json] = []
    for index, node in enumerate(step["nodes"]):
        if node["parent"] in at and (index < MOST_NODES or node["status"] in ("accepted", "ended")):
            at[index] = len(nodes)
            nodes.append(node | {"parent": at[node["parent"]]})
    kept = ("count", "root", "next", "top", "seconds", "error")
    return {key: step[key] for key in kept} | {"nodes": nodes, "drafters": [None] * len(step["drafters"])}


def tokens_of(step: Json) -> Iterator[Json]:
    """Yield all parts of a step that have the key "token"."""
    yield from (part for part in (*step["nodes"], *step["top"], step["next"]) if part is not None)


def hidden_step(step: Json) -> Json:
    """Return a step without its tokens: nothing tells one from another."""
    gone = {"token": 0}
    nodes = [{key: value for key, value in node.items() if key != "missed"} | gone for node in step["nodes"]]
    return step | {"root": 0, "top": [], "nodes": nodes, "next": step["next"] and step["next"] | gone}


class LivePage:
    """Handles the routes of the page.

    Args:
        name: of the model.
        slots: of the requests that run.
    """

    def __init__(self, model: AsyncLLM, name: str, slots: Slots, config: ServerConfig) -> None:
        self._llm, self._name, self._slots, self._config = model.llm, name, slots, config
        self._onlooker = Onlooker(self._llm.engine) if self._llm.backend.can_draft else None
        self._shared = not any(read_keys(config)) and config.host not in LOOPBACK
        self._chats = config.chat_template is not None or self._llm.tokenizer.has_chat_template

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        for path, name in (("/", "page.html"), *((f"/static/{name}", name) for name in PAGE_FILES)):
            app.add_api_route(path, _file(name), methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
        app.add_api_route("/page/state", self.state, methods=["GET"], response_model=None, include_in_schema=False)

    async def state(self, http: Request) -> Response:
        """Answer with all that the page shows."""
        viewer = http.scope["owner"]
        wanted, answer = (http.query_params.get(name, "")[:100] for name in ("request", "answer"))
        state: Json = {
            "version": __version__,
            "model": self._name,
            "admin": viewer == ADMIN,
            "chat": self._chats,
            "drafters": [],
            "controller": "",
            "learning": [],
            "counts": None,
            "tree": None,
            "words": None,
            "answer": None,
        }
        if self._onlooker is None:
            running = self._slots.running
            count = running.total() if viewer == ADMIN else running.get(viewer, 0)
            return json_response(state | {"running": count, "waiting": 0, "requests": []})
        counts, tree, words, sums = self._onlooker.look(viewer, wanted, answer)
        parts = self._llm.engine.parts
        state |= {"drafters": list(parts.drafter_set.names), "controller": parts.controller.name, "counts": counts}
        state |= {"words": words, "answer": sums}
        learned = parts.drafter_set.learning(lambda tenant: sees(viewer, owner_of(tenant)))
        state["learning"] = [f"{one.drafter}: {one.words}" for one in learned]
        state["tree"] = None if tree is None else self._shown(tree, viewer)
        return json_response(state | self._requests(viewer), headers={"Cache-Control": "no-store"})

    def _requests(self, viewer: str) -> Json:
        """Return the requests that a viewer may know of."""
        each = [backend.requests() for backend in self._llm.backends]
        running = [request for requests in each for request in requests.running]
        waiting = [request for requests in each for request in requests.waiting]
        mine = [request for request in running if sees(viewer, owner_of(request.tenant))]
        return {
            "running": len(mine),
            "waiting": sum(sees(viewer, owner_of(request.tenant)) for request in waiting),
            "requests": [
                {
                    "id": request.id,
                    "owner": owner_of(request.tenant)[:12],
                    "tokens": request.metrics.num_generation_tokens,
                }
                for request in mine[-MOST_REQUESTS:]
            ],
        }

    def _shown(self, tree: Json, viewer: str) -> Json:
        """Return a tree with the texts of its tokens, or without where the viewer must not read them."""
        readable = self._config.log_requests or (tree["owner"] == viewer and not self._shared)
        step = tree["step"] if readable else hidden_step(tree["step"])
        ids = {step["root"], *(part["token"] for part in tokens_of(step))}
        spell: Callable[[int], str] = self._llm.tokenizer.token_text if readable else lambda _: "\N{BULLET}"
        return tree | {
            "owner": tree["owner"][:12],
            "readable": readable,
            "step": step,
            "texts": {str(token): spell(token)[:MOST_TEXT] for token in ids},
        }


def _file(name: str) -> Callable[[], Any]:
    """Return a handler that answers with a file of the package, read once."""
    folder = PAGES if name in ("explain.css", "tree.js") else FILES
    content, kind = (folder / name).read_bytes(), f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"

    async def answer() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return answer
