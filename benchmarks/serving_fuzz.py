"""Bodies that no client should send: valid requests of every route, changed at random places, are answered with what
was asked for or with one error that names what is wrong, and harm nobody.

usage: serving_fuzz.py [--count 5000] [--seed 0] [--clients 6]

A server of its own process (the bundled model, strict, with searches and batches) gets bodies of BODIES, in each of
which one to three places are changed: a value becomes one of JUNK or that of another place, a field goes, is doubled or
gets another name, a list repeats itself, or bytes of the text are changed. Every answer must be 200, or a status of
REFUSED with one line of OpenAI's (Anthropic's) form; a 400 of a body that is JSON must name a field, but where none is
to blame. A server that hangs, drops a connection, answers with anything else, or tells of its code, is wrong. Among
these come requests of which `LLM` knows the texts: these must be equal, and the server be empty afterwards. As a
control, each of these texts with a letter changed must be noticed. Exits with 1 where something is wrong.

Results: `results/serving_fuzz.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, save
from served import CHAT, COMPLETIONS, Child, Reply, child, free_port, get, paceline, parsed, request_bytes
from stand_ins import random_cross_encoder
from tqdm import tqdm

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts

REFUSED = (400, 401, 404, 413, 415, 422, 429)
BODY_BYTES = 200_000
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
)
HELLO = [{"role": "user", "content": "Say hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3, "presence_penalty": 0.2,
           "frequency_penalty": 0.1, "repetition_penalty": 1.1, "stop": ["."], "n": 2, "logit_bias": {"5": -3},
           "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [7]}  # fmt: skip
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 6, "logprobs": 2, "echo": True, **SAMPLED}),
    (COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "temperature": 0, "stream": True,
                   "stream_options": {"include_usage": True}, "prediction": "and then", "user": "me"}),
    (COMPLETIONS, {"prompt": "A", "max_tokens": 5, "search": {"method": "beam", "beam_width": 3}, "temperature": 0}),
    (COMPLETIONS, {"prompt": "A", "max_tokens": 5, "structured_outputs": {"regex": "[ab]+ [0-9]{2}"}}),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, **SAMPLED}),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief"}, *HELLO], "max_tokens": 20, "response_format":
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}),
    (CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 20, "stream": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                       "max_output_tokens": 5, "instructions": "Be brief", "store": True, "temperature": 0.5}),
    ("/v1/messages", {"model": "model", "messages": HELLO, "max_tokens": 5, "system": "Be brief", "stream": False,
                      "tools": [{"name": "add", "input_schema": SCHEMA}], "stop_sequences": ["."]}),
    ("/v1/messages/count_tokens", {"model": "model", "messages": HELLO}),
    ("/completion", {"prompt": "Once", "n_predict": 5, "temperature": 0.7, "top_k": 5, "n_probs": 2, "grammar":
                     'root ::= "a" | "b"', "cache_prompt": True}),
    ("/v1/embeddings", {"input": ["one text", "another"], "encoding_format": "float", "dimensions": 16}),
    ("/v1/rerank", {"query": "one", "documents": ["a text", "one"], "top_n": 1}),
    ("/v1/score", {"text_1": "one", "text_2": ["one", "two"]}),
    ("/tokenize", {"prompt": "some words", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/apply-template", {"messages": HELLO}),
    ("/v1/batches", {"input_file_id": "file-none", "endpoint": COMPLETIONS, "completion_window": "24h"}),
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"), "", " ", "\0",
    "\ud800", "a" * 5000, "\u202e\U0001f600", "null", "-1", [], [[]], [None], [1, "a"], {}, {"a": 1}, {"": {}},
    [[[[[[[[[[]]]]]]]]]], {"type": "object"}, ["a"] * 300, "{{ 7 * 7 }}", "../../etc/passwd", {"method": "beam"},
)  # fmt: skip

Places = list[tuple[Any, Any]]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """A copy with one place changed."""
    found = copy.deepcopy(body)
    where: Places = list(places(found))
    if not where:
        return {"prompt": copy.deepcopy(dice.choice(JUNK))}
    holder, key = dice.choice(where)
    how = dice.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[dice.choice(["n", "prompt", "messages", "x" * 40, "max_token", "", "stream"])] = holder.pop(key)
    elif how == 2:
        other, name = dice.choice(where)
        holder[key] = copy.deepcopy(other[name])
    elif how == 3 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder) * dice.choice([1, 3, 40]))
    else:
        holder[key] = copy.deepcopy(dice.choice(JUNK))
    return found


def broken(data: bytes, dice: random.Random) -> bytes:
    """The same bytes, some of them others, gone, or repeated."""
    found = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        place = dice.randrange(len(found) + 1)
        end = place + dice.randrange(1, 9)
        found[place:end] = dice.choice([b"", bytes([dice.randrange(256)]), bytes(found[place:end]) * 2, b'"', b"}"])
    return bytes(found) or b"{"


@dataclass(slots=True)
class Seen:
    """What came back."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    unnamed: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


class Fuzz:
    """Sends changed bodies to one server.

    Args:
        known: bodies of completions, and their texts.
    """

    def __init__(self, server: Child, known: list[tuple[dict[str, Any], str]], seed: int) -> None:
        self.server, self.known, self.dice, self.seen = server, known, random.Random(seed), Seen()

    async def send(self, path: str, data: bytes) -> Reply:
        reader, writer = await asyncio.open_connection(*self.server.address)
        try:
            writer.write(request_bytes(path, data))
            return parsed(Reply(raw=await asyncio.wait_for(reader.read(-1), 60)))
        finally:
            writer.close()

    async def one(self) -> None:
        """A changed body, and what is wrong with its answer."""
        path, body = self.dice.choice(BODIES)
        for _ in range(self.dice.choice([1, 1, 1, 2, 3])):
            body = changed(body, self.dice)
        data = json.dumps(body).encode()
        if self.dice.random() < 0.15:
            data = broken(data, self.dice)
        try:
            reply = await self.send(path, data)
        except Exception as error:
            if isinstance(error, ConnectionError) and len(data) > BODY_BYTES:
                return  # it was answered before it was read to its end
            self.seen.wrong.append(f"{type(error).__name__} {error} after {path} {data[:300]!r}")
            return
        self.seen.statuses.setdefault(path, Counter())[reply.status] += 1
        if why := self.fault(path, data, reply):
            self.seen.wrong.append(f"{why}: {reply.status} {reply.raw[-300:]!r} after {path} {data[:400]!r}")

    def fault(self, path: str, data: bytes, reply: Reply) -> str:
        """What is wrong with an answer; empty if nothing."""
        if b"Traceback" in reply.raw or b'.py"' in reply.raw:
            return "it tells of code"
        if reply.status == 200:
            failed = [event for event in reply.events if event.get("error")]
            return "a stream ended by an error" if failed else ""
        if reply.status not in REFUSED:
            return "not a status for this"
        said = reply.body.get("error")
        if not isinstance(said, dict) or not said.get("message") or "\n" in said["message"]:
            return "no error of one line"
        if (
            reply.status == 400
            and not path.startswith("/v1/messages")
            and said.get("param") is None
            and is_object(data)
        ):
            self.seen.unnamed[said["message"][:90]] += 1
        return ""

    async def unchanged(self) -> None:
        """Every body as it stands is answered."""
        for path, body in BODIES:
            reply = await self.send(path, json.dumps(body).encode())
            if reply.status != (404 if path == "/v1/batches" else 200):
                self.seen.wrong.append(f"{reply.status} {reply.raw[-300:]!r} after {path} as it should be")

    async def reference(self) -> None:
        """A request whose text is known."""
        body, wanted = self.dice.choice(self.known)
        reply = await self.send(COMPLETIONS, json.dumps(body).encode())
        if reply.status != 200 or not self.equal(reply.body["choices"][0]["text"], wanted):
            self.seen.wrong.append(f"{reply.raw[-200:]!r} in place of {wanted!r}")

    def equal(self, text: str, wanted: str) -> bool:
        self.seen.compared += 1
        return text == wanted

    async def client(self, left: Iterator[int]) -> None:
        for number in left:
            await (self.reference() if number % 10 == 0 else self.one())

    async def at_rest(self) -> dict[str, int]:
        """What still runs or waits, half a minute after the last request at the latest."""
        found: dict[str, int] = {}
        for _ in range(300):
            health = (await get(self.server.address, "/load")).body
            found = {name: value for name, value in health.items() if isinstance(value, int)}
            if not any(found.values()):
                break
            await asyncio.sleep(0.1)
        return found


def is_object(data: bytes) -> bool:
    """Whether it is a JSON object."""
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def references() -> list[tuple[dict[str, Any], str]]:
    """Greedy requests, and the texts that `LLM` gives."""
    llm = LLM(exactness="strict", profile=False, speculative_config=None)
    bodies = [{"prompt": one.prompt[:120], "max_tokens": 16, "temperature": 0.0} for one in bundled_prompts()[:8]]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [(body, output.outputs[0].text) for body, output in zip(bodies, outputs, strict=True)]


async def fuzz(server: Child, given: argparse.Namespace) -> tuple[Seen, dict[str, int]]:
    run = Fuzz(server, references(), given.seed)
    await run.unchanged()
    left = iter(tqdm(range(given.count), unit="request"))
    await asyncio.gather(*(run.client(left) for _ in range(given.clients)))
    if any(run.equal(text, f"{text[:-1]}~") for _, text in run.known):
        run.seen.wrong.append("a changed reference was not noticed")
    return run.seen, await run.at_rest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    port, folder = free_port(), Path(tempfile.mkdtemp())
    (folder / "template.jinja").write_text(TEMPLATE)
    limits = {
        "max_num_seqs": 8,
        "max_request_tokens": 64,
        "max_body_bytes": BODY_BYTES,
        "batch_folder": folder / "kept",
    }
    limits |= {"rerank_model": random_cross_encoder(), "served_model_name": "model"}
    more = {"exactness": "strict", "chat_template": folder / "template.jinja", "tool_call_parser": "hermes"}
    command = [*paceline(None, "auto", port=port, threads=1, **limits, **more), "--enable-search"]
    with child(command, threads=1, port=port) as server:
        seen, rest = asyncio.run(fuzz(server, given))
    wrong = seen.wrong + [f"{name} is {value} at rest" for name, value in rest.items() if value]
    result = {
        "requests": given.count,
        "seed": given.seed,
        "answers": {path: {str(status): count for status, count in sorted(found.items())}
                    for path, found in sorted(seen.statuses.items())},
        "compared with references": seen.compared,
        "errors that name no field": dict(seen.unnamed.most_common(20)),
        "wrong": wrong[:20],
    }  # fmt: skip
    save("serving_fuzz", result, given.folder)
    print(json.dumps(result, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
