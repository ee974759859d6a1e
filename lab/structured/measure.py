"""Measuring libraries of structured outputs: what they compile, what they let through, what a model writes under them.

Per schema: every library compiles it; where the set asks a model, the model writes a value under each library and
without any, in turn, greedily; then every library follows the values that come with the schema, and those that were
written and satisfy it, token by token. Definitions are those of JSONSchemaBench (arXiv:2501.10868), section 4:

declared    the schema compiles
empirical   what the model writes under it ends, and satisfies the schema
compliance  empirical over declared
true        the constraint is the schema: here, all values known to satisfy it pass, and none that violates it does

A value is written by `json.dumps` with its keys in its own order, in the schema's, and where they are four or fewer in
every other; it passes where one of these does, as most libraries fix an order, which JSON does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Any, Final

from lab.peers import PeerError
from lab.structured.library import OURS, LibraryProcess, Masked
from lab.structured.sets import Case, Question, SchemaSet
from paceline.config import SamplingParams
from paceline.llm import LLM

FREE: Final = "no constraint"
LONGEST: Final = 1024
"""Tokens of a value that is followed; longer ones are left out."""

FEW_KEYS: Final = 4
REQUEST: Final = "Write a JSON value with made-up content that satisfies this JSON schema, and nothing else:\n"

SHOWN: Final = 1500
"""Characters of a schema that the model is shown."""

ANSWER: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"reasoning": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["reasoning", "answer"],
    "additionalProperties": False,
}
"""What an answer to a question must be."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Found:
    """Of one library on one case.

    Attributes:
        error: why it does not compile, crashed or took too long; None where all went well.
        compile, first: seconds to the first mask, and those of the mask alone.
        written: what the model wrote under it, None where it was not asked; `finish` is why it ended.
        satisfies: whether that is a value of the schema.
        accepted: of the case's valid values; `passed` of its invalid ones.
        seconds: of each token of the values that were followed.
    """

    error: str | None = None
    declared: bool = False
    compile: float | None = None
    first: float | None = None
    written: str | None = None
    finish: str | None = None
    satisfies: bool | None = None
    accepted: list[bool] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def true(self) -> bool:
        """Whether the constraint decides as the schema does."""
        return self.declared and self.error is None and all(self.accepted) and not any(self.passed)


@dataclass(slots=True)
class MeasuredSet:
    """Results of one set, case by case: name of a library -> what was found.

    Attributes:
        unsound: cases left out, as the judge cannot judge by their schemas.
        doubtful: values left out, as they are too long or the judge disagrees with the set.
    """

    of: SchemaSet
    rows: list[tuple[Case, dict[str, Found]]] = field(default_factory=list)
    unsound: int = 0
    doubtful: int = 0


class StructuredBench:
    """Measures libraries on sets of schemas, and on questions.

    Args:
        llm: writes, without drafts.
        libraries: see `open_libraries`.
        judge: see `open_judge`.
        max_tokens: of each output.
        show: told of (stage, done, total).
    """

    def __init__(
        self, llm: LLM, libraries: Sequence[LibraryProcess], judge: LibraryProcess, *, max_tokens: int, show: Progress
    ) -> None:
        self.llm, self.libraries, self.judge = llm, libraries, judge
        self.max_tokens, self._show = max_tokens, show

    def measure(self, chosen: SchemaSet, into: MeasuredSet) -> None:
        """All cases of a set; `into` holds what is done at any time."""
        for done, case in enumerate(chosen.cases):
            self._show(chosen.name, done, len(chosen.cases))
            kept, sound = self._checked(case, into)
            if not sound:
                into.unsound += 1
                continue
            into.rows.append((kept, self._case(kept, asked=chosen.asked)))

    def _checked(self, case: Case, into: MeasuredSet) -> tuple[Case, bool]:
        """The case with those of its values that the judge agrees on, and whether it can judge at all."""
        values = [*case.valid, *case.invalid]
        try:
            verdict = self.judge.ask("check", schema=json.dumps(case.schema), texts=[json.dumps(one) for one in values])
        except PeerError:
            return case, False
        if not verdict["sound"]:
            return case, False
        sides: tuple[list[Any], list[Any]] = ([], [])
        for place, (value, valid) in enumerate(zip(values, verdict["valid"], strict=True)):
            meant = place < len(case.valid)
            if valid == meant and len(self._tokens(value)) <= LONGEST:
                sides[0 if meant else 1].append(value)
            else:
                into.doubtful += 1
        return Case(case.name, case.schema, tuple(sides[0]), tuple(sides[1])), True

    def _case(self, case: Case, *, asked: bool) -> dict[str, Found]:
        found = {one.name: Found() for one in self.libraries}
        for library in self.libraries:
            with _one_case(found[library.name]) as mine:
                self._compile(library, case.schema, mine)
        if asked:
            self._write(case, found)
        texts = [one.written for one in found.values() if one.satisfies and one.written is not None]
        own = [self.llm.tokenizer.encode(text, add_special_tokens=False) for text in dict.fromkeys(texts)]
        for library in self.libraries:
            if found[library.name].declared:
                with _one_case(found[library.name]) as mine:
                    self._follow(library, case, own, mine)
        return found

    def _compile(self, library: LibraryProcess, schema: Any, found: Found) -> None:
        answer = library.ask("compile", schema=json.dumps(schema))
        found.error, found.compile, found.first = answer["error"], answer["seconds"], answer["first"]
        found.declared = found.error is None

    def _write(self, case: Case, found: dict[str, Found]) -> None:
        """Let the model write under every library that compiles the schema, and freely; then judge it all at once."""
        schema = json.dumps(case.schema)
        prompt = self._prompt(REQUEST + schema[:SHOWN])
        rules: dict[str, dict[str, Any]] = {FREE: {}}
        for library in self.libraries:
            if found[library.name].declared:
                with _one_case(found[library.name]):
                    rules[library.name] = self.bound(library, case.schema)
        found[FREE] = Found()
        self._generate(prompt, rules, found)
        written = [one for one in found.values() if one.written is not None]
        try:
            valid = self.judge.ask("check", schema=schema, texts=[one.written for one in written])["valid"]
        except PeerError:  # a pattern that takes for ever
            valid = [False] * len(written)
        for one, fine in zip(written, valid, strict=True):
            one.satisfies = fine and one.finish == "stop"

    def bound(self, library: LibraryProcess, schema: Any) -> dict[str, Any]:
        """Parameters of a request that hold an output to the schema that a library has compiled: ours by the engine's
        own structured outputs, others by their masks.
        """
        if library.name in OURS:
            return {"structured_outputs": {"json": schema, "strict": OURS[library.name]}}
        return {"logits_processors": [Masked(library)]}

    def _generate(self, prompt: list[int], rules: Mapping[str, Mapping[str, Any]], found: Mapping[str, Found]) -> None:
        """One output under the rules of each library, all in one batch."""
        common = {"temperature": 0.0, "max_tokens": self.max_tokens}
        params = [SamplingParams.from_dict({**common, **rule}) for rule in rules.values()]
        outputs = self.llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
        for name, output in zip(rules, outputs, strict=True):
            one, mine = output.outputs[0], found[name]
            mine.finish, mine.error = one.finish_reason, mine.error or one.error
            mine.written = without_fence(one.text) if name == FREE else one.text

    def _prompt(self, text: str) -> list[int]:
        if self.llm.tokenizer.has_chat_template:
            return self.llm.chat_ids([{"role": "user", "content": text}])
        return self.llm.tokenizer.encode(text + "\n")

    def _tokens(self, value: Any) -> list[int]:
        text = json.dumps(value, ensure_ascii=False)
        if any("\ud800" <= sign <= "\udfff" for sign in text):  # half a character, which only an escape can spell
            text = json.dumps(value)
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def _follow(self, library: LibraryProcess, case: Case, own: list[list[int]], found: Found) -> None:
        values = (*case.valid, *case.invalid)
        spelled = [[self._tokens(one) for one in spellings(case.schema, value)] for value in values]
        texts = [text for one in spelled for text in one] + own
        if not texts:
            return
        answer = library.ask("follow", texts=texts)
        verdicts = iter(answer["accepted"])
        passes = [any(list(islice(verdicts, len(one)))) for one in spelled]
        found.accepted, found.passed = passes[: len(case.valid)], passes[len(case.valid) :]
        found.seconds = answer["seconds"]

    def answer(self, questions: Sequence[Question], into: dict[str, list[Found]]) -> None:
        """Questions, answered under every library that compiles `ANSWER` and freely; the first two are examples."""
        bound: list[LibraryProcess] = []
        for library in self.libraries:
            with _one_case(Found()) as started:
                self._compile(library, ANSWER, started)
            bound += [library] if started.declared else []
        into |= {FREE: []} | {one.name: [] for one in bound}
        for done, question in enumerate(questions[2:]):
            self._show("questions", done, len(questions) - 2)
            prompt = self._prompt(asked(questions[:2], question))
            rules: dict[str, dict[str, Any]] = {FREE: {}}
            found = {name: Found() for name in into}
            for library in bound:
                with _one_case(found[library.name]):
                    rules[library.name] = self.bound(library, ANSWER)
            self._generate(prompt, rules, found)
            for name, one in found.items():
                number = answer_of(one.written or "")
                one.satisfies, one.accepted = number is not None, [number == question.answer]
                into[name].append(one)


@contextmanager
def _one_case(found: Found) -> Iterator[Found]:
    """A library that crashes within, or takes too long, fails the case."""
    try:
        yield found
    except PeerError as error:
        found.error = str(error)


def asked(examples: Sequence[Question], question: Question) -> str:
    """The words of a question."""
    parts = ['Solve the problem. Answer with JSON of this form: {"reasoning": "...", "answer": 7}']
    for one in examples:
        parts += [f"Problem: {one.text}", json.dumps({"reasoning": one.worked, "answer": one.answer})]
    return "\n\n".join([*parts, f"Problem: {question.text}"])


def answer_of(text: str) -> int | None:
    """The number in an answer of the form that was asked for."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    number = found.get("answer") if isinstance(found, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def without_fence(text: str) -> str:
    """What stands in the first code block of a text, or all of it."""
    before, fence, rest = text.partition("```")
    return rest.partition("\n")[2].partition("```")[0] if fence and not before.strip() else text.strip()


def spellings(schema: Any, value: Any) -> list[Any]:
    """The value with its keys in its own order, in the schema's, and where they are few, in every other."""
    found = [value, _in_order(schema, value)]
    if isinstance(value, dict) and len(value) <= FEW_KEYS:
        found += [dict(pairs) for pairs in permutations(value.items())]
    return list({json.dumps(one): one for one in found}.values())


def _in_order(schema: Any, value: Any) -> Any:
    inner = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_in_order(inner.get("items"), one) for one in value]
    if not isinstance(value, dict):
        return value
    named = inner.get("properties")
    named = named if isinstance(named, dict) else {}
    keys = [key for key in named if key in value] + [key for key in value if key not in named]
    return {key: _in_order(named.get(key), value[key]) for key in keys}
