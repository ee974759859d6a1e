"""The sets of schemas, and the questions, that libraries of structured outputs are measured on.

A set lies in a folder of its own: `schemastore` and `iglu-central` hold JSON lines (`schema`, and for SchemaStore
`valid` and `invalid` with an `instance` each), `json-schema-test-suite` the suite in its own layout, `gsm8k` the
questions of GSM8K with their worked answers.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError

QUESTIONS: Final = "gsm8k"
SUITE: Final = "json-schema-test-suite"
DRAFT: Final = "draft2020-12"
"""Of the test suite: the meaning of schemas that do not say which they have."""

ELSEWHERE: Final = re.compile(r'"\$(?:dynamic|recursive)?[rR]ef": "[^#]')
"""A reference out of a schema, which libraries would have to fetch."""

IGLU: Final = ("$schema", "self")
"""Words of Iglu's own dialect."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, with values that satisfy it and values that do not, as far as the set has them."""

    name: str
    schema: Any
    valid: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()

    @property
    def decides(self) -> bool:
        """Whether it can tell a right constraint from one that takes everything, and from one that takes nothing."""
        return bool(self.valid and self.invalid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaSet:
    """Cases of one set.

    Attributes:
        found: in the folder, before any was left out.
        elsewhere: left out for a reference out of the schema.
        asked: whether a model is asked for values; the suite's schemas describe nothing.
    """

    name: str
    cases: Sequence[Case]
    found: int
    elsewhere: int
    asked: bool


@dataclass(frozen=True, slots=True)
class Question:
    """One of GSM8K, with its worked answer and its number."""

    text: str
    worked: str
    answer: int


def load_sets(folder: Path, count: int, cases: int) -> list[SchemaSet]:
    """The sets that a folder holds, each with schemas that are spread evenly over it.

    Args:
        count: schemas of each set, as far as there are so many.
        cases: of the test suite, which cost less, as no model is asked.
    Raises:
        ConfigError: no such folder, none of the sets in it, or a file that is not what it should be.
    """
    if not folder.is_dir():
        raise ConfigError(f"--data must be a folder, got {str(folder)!r}; name one that holds {', '.join(READERS)}")
    names = [name for name in READERS if (folder / name).is_dir()]
    found = [_spread(name, folder / name, cases if name == SUITE else count) for name in names]
    if not found:
        raise ConfigError(f"--data {str(folder)!r} holds none of the folders {', '.join(READERS)}; name their parent")
    return found


def _spread(name: str, folder: Path, count: int) -> SchemaSet:
    try:
        every = list(READERS[name](folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--data: {str(folder)!r} cannot be read ({error!r}); it must hold {name} as published"
        ) from None
    own = [case for case in every if not ELSEWHERE.search(json.dumps(case.schema))]
    if not own:
        raise ConfigError(f"--data: {str(folder)!r} holds no schema that can be used; it must hold {name} as published")
    taken = min(count, len(own))
    cases = [own[place * len(own) // taken] for place in range(taken)]
    return SchemaSet(
        name=name,
        cases=cases,
        found=len(every),
        elsewhere=len(every) - len(own),
        asked=name != "json-schema-test-suite",
    )


def _schemastore(folder: Path) -> Iterator[Case]:
    for row in _rows(folder):
        valid, invalid = (tuple(one["instance"] for one in row.get(key, ())) for key in ("valid", "invalid"))
        yield Case(row["name"], row["schema"], valid, invalid)


def _iglu(folder: Path) -> Iterator[Case]:
    for row in _rows(folder):
        yield Case(row["path"], {key: value for key, value in row["schema"].items() if key not in IGLU})


def _suite(folder: Path) -> Iterator[Case]:
    """The required part of one draft, without what refers to other files."""
    for path in sorted((folder / "tests" / DRAFT).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")) if path.stem != "refRemote" else ():
            sides: dict[bool, list[Any]] = {True: [], False: []}
            for test in group["tests"]:
                sides[test["valid"]].append(test["data"])
            name = f"{path.stem}: {group['description']}"
            yield Case(name, group["schema"], tuple(sides[True]), tuple(sides[False]))


READERS: Final[Mapping[str, Callable[[Path], Iterator[Case]]]] = {
    "schemastore": _schemastore,
    "iglu-central": _iglu,
    SUITE: _suite,
}


def load_questions(folder: Path, count: int) -> list[Question]:
    """So many questions of GSM8K, the first two more, which serve as examples; none without its folder.

    Raises:
        ConfigError: a file that is not what it should be, or fewer than three questions.
    """
    if count == 0 or not (folder / QUESTIONS).is_dir():
        return []
    try:
        rows = islice(_rows(folder / QUESTIONS, "test*.jsonl*"), count + 2)
        found = [_question(row["question"], row["answer"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = str(folder / QUESTIONS)
        raise ConfigError(f"--data: {where!r} cannot be read ({error}); it must hold GSM8K's test*.jsonl") from None
    if len(found) < 3:
        raise ConfigError(f"--data: {str(folder / QUESTIONS)!r} must hold three questions or more, got {len(found)}")
    return found


def _question(text: str, worked: str) -> Question:
    steps, _, number = worked.partition("####")
    return Question(text, re.sub(r"<<.*?>>", "", steps).strip(), int(number.replace(",", "")))


def _rows(folder: Path, pattern: str = "*.jsonl*") -> Iterator[Any]:
    """Of all files of JSON lines, in order of their names."""
    for path in sorted(folder.glob(pattern)):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
