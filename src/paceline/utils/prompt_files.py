"""Reads benchmark files: Spec-Bench, MT-Bench, MT-Redundant, HumanEval, GSM8K, plain JSONL, text, request traces.

Nothing is downloaded.

Formats are told apart by the keys of the first row:
    turns and category      spec-bench, mt-bench or mt-redundant: one format, {"question_id", "category", "turns":
                            [...]}; Spec-Bench where a category of its own (translation, rag, ...) occurs, else by the
                            file's name
    task_id and prompt      humaneval: a program to go on with
    question                gsm8k: a word problem
    input_length            trace: {"timestamp", "input_length", "output_length"}, JSONL or CSV
    prompt, text, messages  jsonl: a message, a text to go on with, or a conversation whose last message is from the
                            user, or the answer to it
Any of them may be compressed (.gz).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PromptError
from paceline.utils.near_files import near_file
from paceline.utils.traces import Arrival, parse_trace

PROMPT_FORMATS = ("spec-bench", "mt-bench", "mt-redundant", "humaneval", "gsm8k", "jsonl", "text", "trace")
MT_BENCH_TASKS = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
PLAIN_KEYS = "'prompt' (a message), 'text' (to go on with) or 'messages' (a conversation)"
"""A row of the format jsonl has one of them."""

MOST_BYTES = 256 * 1024 * 1024

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Holds one item of a workload: a conversation of one or more turns.

    Attributes:
        id: unique in its workload.
        task: what its figures are grouped by.
        turns: user messages in order; each is decoded after the answers before it. Empty where `token_ids` is given.
        history: messages before the first turn ({"role", "content"}), a system message for instance.
        chat: whether the turns are messages, to be rendered by a chat template; otherwise the one turn is a text to go
            on with.
        token_ids: the prompt itself, for synthetic ones.
        max_tokens: most new tokens, where the workload says so; then end tokens are ignored.
        answer: to the turn, where the file holds one. ended: whether that answer goes no further.
    """

    id: str
    task: str
    turns: tuple[str, ...] = ()
    history: tuple[dict[str, str], ...] = ()
    chat: bool = True
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    answer: str | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Names a list of conversations, or of arrivals.

    Attributes:
        name: unique in a run.
        format: one of PROMPT_FORMATS, "synthetic" or "bundled".
        source: name of the file, or the parameters.
        arrivals: of a request trace; None for prompts.
    """

    name: str
    format: str
    source: str
    conversations: tuple[Conversation, ...] = ()
    arrivals: tuple[Arrival, ...] | None = None

    @property
    def tasks(self) -> dict[str, int]:
        """Count conversations by task."""
        return dict(Counter(conversation.task for conversation in self.conversations))

    def limited(self, most: int | None) -> Workload:
        """At most so many conversations, taken from the tasks in turn, so that each keeps its share; or the first
        arrivals.
        """
        if most is None:
            return self
        if self.arrivals is not None:
            return replace(self, arrivals=self.arrivals[:most])
        rank: Counter[str] = Counter()
        keyed = []
        for position, conversation in enumerate(self.conversations):
            keyed.append((rank[conversation.task], position))
            rank[conversation.task] += 1
        picked = sorted(position for _, position in sorted(keyed)[:most])
        return replace(self, conversations=tuple(self.conversations[position] for position in picked))

    def to_dict(self) -> dict[str, Any]:
        """Give its entry in the document."""
        trace = self.arrivals is not None
        return {
            "name": self.name,
            "format": self.format,
            "source": self.source,
            "kind": "trace" if trace else "prompts",
            "conversations": len(self.arrivals or ()) if trace else len(self.conversations),
            "turns": sum(max(1, len(c.turns)) for c in self.conversations),
            "tasks": self.tasks,
        }


def read_prompts(path: Path, format: str | None = None) -> Workload:
    """Read the workload in a file.

    Args:
        format: one of FORMATS; None recognises it.
    Raises:
        ConfigError: an unknown format.
        PromptError: a file that cannot be read, holds nothing, or not what its format says.
    """
    if format is not None and format not in PROMPT_FORMATS:
        raise ConfigError(f"the format must be one of {', '.join(PROMPT_FORMATS)}, got {format!r}")
    text = text_of_file(path)
    if format == "text" or (format is None and _kind(path) not in (".json", ".jsonl", ".csv")):
        return _workload(path, "text", _texts(text))
    if format == "trace" or _kind(path) == ".csv":
        return _trace(path, text)
    rows = _rows(path, text)
    format = format or recognise(rows, path)
    if format == "trace":
        return _trace(path, text)
    conversations = []
    for number, row in enumerate(rows, 1):
        try:
            conversations.append(READERS[format](row, number))
        except (KeyError, TypeError, ValueError) as error:
            why = f"no key {error}" if isinstance(error, KeyError) else str(error)
            what = f"{path.name!r} row {number} is not in the format {format} ({why})"
            raise PromptError(f"{what}; mend the row, or name another format, in `bench` as FORMAT=PATH") from None
    return _workload(path, format, conversations)


def recognise(rows: Sequence[Row], path: Path) -> str:
    """Recognise the format of some rows.

    Raises:
        PromptError: none that is known.
    """
    first = rows[0]
    if "turns" in first:
        if {str(row.get("category")) for row in rows} - MT_BENCH_TASKS:
            return "spec-bench"
        return "mt-redundant" if "redundant" in path.name.lower() else "mt-bench"
    if "task_id" in first and "prompt" in first:
        return "humaneval"
    if "input_length" in first:
        return "trace"
    if {"prompt", "text", "messages"} & set(first):
        return "jsonl"
    if "question" in first:
        return "gsm8k"
    keys = ", ".join(sorted(map(str, first)))[:100]
    raise PromptError(
        f"{path.name!r} is in no known format (its first row has the keys {keys}); give each row {PLAIN_KEYS}, or the "
        f"keys of {', '.join(PROMPT_FORMATS[:5])}"
    )


def text_of_file(path: Path) -> str:
    """The text of a file in UTF-8; of a name that ends in `.gz`, unpacked.

    Raises:
        PromptError: it cannot be read, is no text, or is too large.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise PromptError(f"{str(path)!r} is larger than {MOST_BYTES} bytes; give a part of it")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); give a text"
        ) from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read the workload {str(path)!r} ({why}); give a file{near_file(path)}") from None


def _kind(path: Path) -> str:
    """The end of its name, that of compression left out."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _rows(path: Path, text: str) -> list[Row]:
    """Rows of JSONL, or of one JSON list of objects."""
    rows: list[Any] = []
    lines = [text] if text.lstrip().startswith("[") else text.split("\n")  # texts may hold other separators of lines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{path.name!r} line {number} is not JSON ({error}); give one object per line") from None
        rows += value if isinstance(value, list) else [{"prompt": value} if isinstance(value, str) else value]
    if not rows:
        raise PromptError(f"no prompts in {str(path)!r}; give at least one row")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise PromptError(f"{path.name!r} row {number} is not an object; give one object per line")
    return rows


def _workload(path: Path, format: str, conversations: Sequence[Conversation]) -> Workload:
    if not conversations:
        raise PromptError(f"no prompts in {str(path)!r}; give at least one")
    seen: dict[str, int] = {}
    unique = []
    for conversation in conversations:
        count = seen[conversation.id] = seen.get(conversation.id, 0) + 1
        name = conversation.id if count == 1 else f"{conversation.id}#{count}"
        unique.append(replace(conversation, id=name))
    name = format if format in PROMPT_FORMATS[:5] else path.stem
    return Workload(name=name, format=format, source=path.name, conversations=tuple(unique))


def _trace(path: Path, text: str) -> Workload:
    arrivals = parse_trace(text, path.name, csv=_kind(path) == ".csv")
    return Workload(name=path.stem, format="trace", source=path.name, arrivals=tuple(arrivals))


def _texts(text: str) -> list[Conversation]:
    """A prompt a line, to go on with."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [Conversation(id=str(i), task="text", turns=(line,), chat=False) for i, line in enumerate(lines, 1)]


def _words(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is not text")
    return value


def _questions(row: Row, number: int) -> Conversation:
    """Spec-Bench, MT-Bench, MT-Redundant."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns is not a list of strings")
    name = str(row.get("question_id", number))
    return Conversation(id=name, task=str(row["category"]), turns=tuple(_words(turn, "a turn") for turn in turns))


def _program(row: Row, number: int) -> Conversation:
    """HumanEval."""
    return Conversation(id=str(row["task_id"]), task="code", turns=(_words(row["prompt"], "prompt"),), chat=False)


def _word_problem(row: Row, number: int) -> Conversation:
    """GSM8K."""
    return Conversation(id=str(row.get("id", number)), task="maths", turns=(_words(row["question"], "question"),))


def _plain(row: Row, number: int) -> Conversation:
    """{"prompt"}, {"text"} or {"messages"}, with "id" and "task" or "category" where there are any."""
    name, task = str(row.get("id", number)), str(row.get("task", row.get("category", "prompts")))
    if "messages" in row:
        history = [
            {"role": _words(m["role"], "role"), "content": _words(m["content"], "content")} for m in row["messages"]
        ]
        answered = len(history) > 1 and history[-1]["role"] == "assistant"
        answer = history.pop()["content"] if answered else None
        if not history or history[-1]["role"] != "user":
            raise ValueError("the last of messages is neither from the user nor an answer to the user")
        return Conversation(
            id=name, task=task, turns=(history[-1]["content"],), history=tuple(history[:-1]), answer=answer,
            ended=bool(row.get("ended", True)),
        )  # fmt: skip
    if "prompt" in row:
        return Conversation(id=name, task=task, turns=(_words(row["prompt"], "prompt"),))
    if "text" not in row:
        raise ValueError(f"its keys are {', '.join(sorted(map(str, row)))[:100]}; it needs {PLAIN_KEYS}")
    return Conversation(id=name, task=task, turns=(_words(row["text"], "text"),), chat=False)


READERS: Mapping[str, Callable[[Row, int], Conversation]] = {
    "spec-bench": _questions,
    "mt-bench": _questions,
    "mt-redundant": _questions,
    "humaneval": _program,
    "gsm8k": _word_problem,
    "jsonl": _plain,
}
