"""Replays made by hand: texts that try to break a page, trees of any size, steps with given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import LLM, SamplingParams
from paceline.engine import RequestMetrics
from paceline.explain import Recorder, Replay, warm_up

NASTY = [
    "</script><script>window.broken = true</script>",
    "<!--<script>",
    "]]>&amp;&lt;",
    "\"'`${window.broken = true}\\",
    "{{ 7 * 7 }}{% raw %}",
    "a\u2028b\u2029c",
    "\x00\x07\x1b[31m\x7f\x85",
    "\ud83d",
    "\udc4d",
    "\N{THUMBS UP SIGN}\N{ZERO WIDTH JOINER}\N{VARIATION SELECTOR-16}",
    "\u202egnp.exe\u2066\ufeff",
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{CJK UNIFIED IDEOGRAPH-6587}",
    "\N{ARABIC LETTER SEEN}\N{ARABIC LETTER LAM}",
    "",
    "\r\n\t  ",
    "x" * 300,
]
SECONDS = {"draft": 0.001, "score": 0.008, "verify": 0.0002, "commit": 0.0003, "other": 0.0001}


def explained(llm: LLM, prompt: str, params: SamplingParams) -> Replay:
    """A real one, after a warm-up."""
    warm_up(llm, prompt, params)
    recorder = Recorder(llm)
    for _ in recorder.run(prompt, params):
        pass
    return Replay(recorder.data())


def node(token: int, parent: int, depth: int, status: str, **more: Any) -> dict[str, Any]:
    """One node by drafter 0, unless told otherwise."""
    return {
        "token": token,
        "parent": parent,
        "depth": depth,
        "source": 0,
        "confidence": 0.5,
        "p": 0.25,
        "status": status,
    } | more


def step(
    nodes: Sequence[dict[str, Any]] = (), *, asked: bool = True, seconds: dict[str, float] = SECONDS, **more: Any
) -> dict[str, Any]:
    """A step whose accepted nodes and own token 0 are committed; drafter 0 had a budget of 16 levels and 32 nodes."""
    stood = [one for one in nodes if one["status"] == "accepted"]
    drafter = {
        "nodes": 32,
        "depth": 16,
        "stop": None,
        "proposed": len(nodes),
        "deepest": max((one["depth"] for one in nodes), default=0),
        "scored": sum(one["status"] != "cut" for one in nodes),
        "accepted": len(stood),
        "seconds": seconds["draft"],
    }
    return {
        "count": len(stood) + 1,
        "root": 1,
        "nodes": list(nodes),
        "next": {"token": 0, "p": 0.75},
        "top": [{"token": 0, "p": 0.75}, {"token": 2, "p": 0.125}, {"token": 3, "p": 0.0625}],
        "drafters": [drafter if asked else None],
        "words": "draft is asked.",
        "seconds": dict(seconds),
        "error": None,
    } | more


def replay(
    steps: Sequence[dict[str, Any]], *, drafters: Sequence[str] = ("draft",), texts: Sequence[str] = NASTY
) -> dict[str, Any]:
    """The data of `bench.replay` around some steps; token i has the text number i."""
    tokens: list[dict[str, Any]] = []
    for index, one in enumerate(steps):
        one["start"] = len(tokens)
        stood = [n for n in one["nodes"] if n["status"] == "accepted"]
        made = [{"token": n["token"], "source": n["source"], "p": n["p"]} for n in stood]
        made.append({"token": one["next"]["token"], "source": None, "p": one["next"]["p"]})
        tokens += [token | {"step": index, "text": texts[token["token"] % len(texts)]} for token in made]
    metrics = RequestMetrics(num_steps=len(steps), num_generation_tokens=len(tokens), generation_time=1.0)
    metrics.num_accepted_tokens = len(tokens) - len(steps)
    return {
        "format": "paceline-replay",
        "version": 1,
        "paceline": "0",
        "model": {"name": NASTY[0], "family": "llama", "dtype": "float32", "device": "cpu"},
        "methods": list(drafters),
        "refused": False,
        "controller": "auto" if drafters else "fixed",
        "sampling": {"temperature": 0.0, "max_tokens": 9, "stop": [NASTY[0]]},
        "prompt": {"text": "".join(NASTY), "tokens": 9},
        "drafters": list(drafters),
        "output": {
            "text": "".join(token["text"] for token in tokens),
            "token_ids": [token["token"] for token in tokens],
            "finish_reason": "stop",
            "stop_reason": NASTY[0],
            "error": None,
            "metrics": metrics.to_dict(),
        },
        "prefill_seconds": 0.002,
        "record_seconds": 0.001,
        "texts": {str(i): text for i, text in enumerate(texts)},
        "tokens": tokens,
        "steps": list(steps),
    }


def wide(width: int, depth: int, texts: int = len(NASTY)) -> list[dict[str, Any]]:
    """A tree whose first path of `depth` nodes is accepted; each has `width - 1` rejected siblings with an unreached
    child each.
    """
    nodes: list[dict[str, Any]] = []
    parent = -1
    for level in range(1, depth + 1):
        first = len(nodes)
        nodes.append(node(len(nodes) % texts, parent, level, "accepted"))
        for _ in range(width - 1):
            nodes.append(node(len(nodes) % texts, parent, level, "rejected", source=1, confidence=0.1))
            nodes.append(node(len(nodes) % texts, len(nodes) - 1, level + 1, "unreached", q=0.3, also=[0]))
        parent = first
    return nodes
