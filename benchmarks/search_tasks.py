"""Generated tasks whose right answers have a closed form, for `searches.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from paceline.search import Sandbox

WRONG = 0.05
"""Reward of a text with a wrong step: a search may still go on from it."""


@dataclass(frozen=True)
class Task:
    """One of them.

    Attributes:
        prompt: of the model. stop: strings that end an answer.
        reward: of texts behind the prompt, ended or not, in 0..1; it knows the answer.
        right: whether an ended text is right.
        known: tests of a program that a search may see; others decide.
    """

    prompt: str
    stop: Sequence[str]
    reward: Callable[[Sequence[str]], list[float]]
    right: Callable[[str], bool]
    known: tuple[str, ...] = ()


NUMBER = re.compile(r"\d+")
NAMES, THINGS = ("Ann", "Ben", "Eva", "Max", "Mia", "Tom"), ("apples", "books", "coins", "eggs", "pens", "shells")
STORY = "Q: {name} has {a} {thing} and {b} {other}, and gets {c} more {thing}. How many {thing} is that?\nA:"
REASON = " {name} had {a} {thing}. {a} + {c} = {answer}. The answer is {answer}.\n\n"


def story(random: Random) -> Task:
    """A sum in words, with a number too many, in three sentences, every one of which can be checked."""
    prompt, a, c, answer = "", 0, 0, 0
    for shown in (True, True, True, True, False):
        a, b, c = (random.randint(2, 9) for _ in range(3))
        answer, (thing, other) = a + c, random.sample(THINGS, 2)
        words = {"name": random.choice(NAMES), "thing": thing, "other": other, "a": a, "b": b, "c": c}
        prompt += STORY.format(**words) + (REASON.format(**words, answer=answer) if shown else "")

    def right(text: str) -> bool:
        found = NUMBER.findall(text)
        return bool(found) and int(found[-1]) == answer

    def sound(text: str) -> bool:
        steps = [[int(one) for one in NUMBER.findall(step)] for step in text.split(".")[:-1]]
        return all(step == wanted for step, wanted in zip(steps, ([a], [a, c, answer], [answer]), strict=False))

    def reward(texts: Sequence[str]) -> list[float]:
        return [1.0 if sound(text) else WRONG for text in texts]

    return Task(prompt, ("\n",), reward, right)


@dataclass(frozen=True)
class _Function:
    """A family of functions: its head, and its value for an argument."""

    head: str
    says: str
    value: Callable[[int, object], object]
    arguments: Callable[[Random], object]


def _numbers(random: Random) -> list[int]:
    return [random.randint(-9, 20) for _ in range(random.randint(2, 6))]


def _word(random: Random) -> str:
    return "".join(random.choice("abcde") for _ in range(random.randint(3, 9)))


FUNCTIONS = (
    _Function("add_{k}(x)", "Return x plus {k}.", lambda k, x: x + k, lambda r: r.randint(-50, 50)),
    _Function("scale(x)", "Return x times {k}, minus 1.", lambda k, x: x * k - 1, lambda r: r.randint(-50, 50)),
    _Function("above(x)", "Return True if x is greater than {k}.", lambda k, x: x > k, lambda r: r.randint(-9, 30)),
    _Function("total(numbers)", "Return the sum of the numbers, plus {k}.", lambda k, x: sum(x) + k, _numbers),
    _Function("spread(numbers)", "Return the largest minus the smallest number.",
              lambda k, x: max(x) - min(x), _numbers),
    _Function("big(numbers)", "Return a list of the numbers above {k}.",
              lambda k, x: [n for n in x if n > k], _numbers),
    _Function("times(numbers)", "Return a list of the numbers, each times {k}.",
              lambda k, x: [n * k for n in x], _numbers),
    _Function("backwards(word)", "Return the word reversed, {k} times in a row.",
              lambda k, x: x[::-1] * k, _word),
    _Function("count_a(word)", "Return how many times the letter a is in the word, plus {k}.",
              lambda k, x: x.count("a") + k, _word),
)  # fmt: skip


@dataclass
class Programs:
    """Runs programs in the sandbox; each of them once."""

    box: Sandbox = field(default_factory=lambda: Sandbox(seconds=5.0))
    known: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def share(self, program: str, tests: tuple[str, ...]) -> float:
        """Of the tests that it passes."""
        if (program, tests) not in self.known:
            self.known[program, tests] = self.box.judge([program], tests)[0].share
        return self.known[program, tests]


EXAMPLES = '''def minus_one(x):
    """Return x minus 1."""
    return x - 1


def positive(numbers):
    """Return a list of the numbers above 0."""
    return [n for n in numbers if n > 0]


def first_letter(word):
    """Return the first letter of the word."""
    return word[0]


'''

ENDS = ("\ndef", "\nclass", "\nprint", "\n#", "\nif", "\nassert", "\n\n\n")
"""Where a function's body ends."""


def program(random: Random, programs: Programs) -> Task:
    """A function from its description, with two tests that a search may see and eight that decide."""
    one, k = random.choice(FUNCTIONS), random.randint(2, 9)
    name = one.head.format(k=k)
    head = EXAMPLES + f'def {name}:\n    """{one.says.format(k=k)}"""'
    tests = []
    for argument in [one.arguments(random) for _ in range(10)]:
        tests.append(f"assert {name.split('(')[0]}({argument!r}) == {one.value(k, argument)!r}")
    return _of_tests(head, tuple(tests[:2]), ("\n".join(tests[2:]),), programs)


def _of_tests(head: str, known: tuple[str, ...], deciding: tuple[str, ...], programs: Programs) -> Task:
    head = head.rstrip("\n")  # which begins the next token

    def reward(texts: Sequence[str]) -> list[float]:
        return [programs.share(head + text, known) for text in texts]

    def right(text: str) -> bool:
        return programs.share(head + text, deciding) == 1.0

    return Task(head, ENDS, reward, right, known)


EXAMPLE = re.compile(r">>> (\w+\(.*\))\n\s*(\S.*)\n")


def humaneval(file: Path, programs: Programs) -> Iterator[Task]:
    """Its tasks that show examples as `>>> call` and value, which a search may see; its own tests decide."""
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        known = tuple(f"assert {call} == {value}" for call, value in EXAMPLE.findall(one["prompt"]))
        if known and one["prompt"].count("def ") == 1:
            yield _of_tests(one["prompt"], known, (f"{one['test']}\ncheck({one['entry_point']})",), programs)


FAMILIES: dict[str, Callable[[Random], Task]] = {
    "story": story,
    "program": partial(program, programs=Programs()),
}
