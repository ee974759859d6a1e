"""What is decoded in a benchmark: conversations with tasks, from files of known formats, made up, or shipped with the
package.

In: what the user typed after --workload. Out: a Workload. Not here: how each format looks (`bench.readers`), made-up
prompts (`bench.synthetic`), arrival times (`bench.trace`), decoding.

    PATH                     the format is recognised by its content
    FORMAT=PATH              the format is named: spec-bench, mt-bench, mt-redundant, humaneval, gsm8k, jsonl, text,
    trace synthetic:KEY=VALUE,...  token ids of a given number and entropy bundled                  the prompts that
    ship with the package
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.bench.trace import Arrival

BUNDLED = "bundled"
SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One item of a workload.

    Attributes:
        id: unique in its workload.
        task: what its figures are grouped by.
        turns: user messages in order; each is decoded after the answers before it. Empty where `token_ids` is given.
        history: messages before the first turn ({"role", "content"}), a system message for instance.
        chat: whether the turns are messages, to be rendered by a chat template; otherwise the one turn is a text to go
        on with.
        token_ids: the prompt itself, for synthetic ones.
        max_tokens: most new tokens, where the workload says so; then end tokens are ignored.
    """

    id: str
    task: str
    turns: tuple[str, ...] = ()
    history: tuple[dict[str, str], ...] = ()
    chat: bool = True
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named list of conversations, or of arrivals.

    Attributes:
        name: unique in a run.
        format: one of `bench.readers.FORMATS`, "synthetic" or "bundled".
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
        """Task -> number of conversations."""
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
        for place, conversation in enumerate(self.conversations):
            keyed.append((rank[conversation.task], place))
            rank[conversation.task] += 1
        picked = sorted(place for _, place in sorted(keyed)[:most])
        return replace(self, conversations=tuple(self.conversations[place] for place in picked))

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the document."""
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


def load(text: str, *, vocab_size: int = 0, max_context: int | None = None, seed: int = 0) -> Workload:
    """The workload that `text` names (see the module's docstring).

    Args:
        vocab_size, max_context: of the model, for synthetic prompts; None takes any length.
        seed: of synthetic prompts.
    Raises:
        ConfigError: an unknown format or parameter. PromptError: a file that cannot be read, or not in its format.
    """
    from paceline.bench import readers, synthetic

    if text == BUNDLED:
        return bundled()
    kind, colon, rest = text.partition(":")
    if kind == SYNTHETIC and (colon or not Path(text).exists()):
        return synthetic.load(rest, vocab_size=vocab_size, max_context=max_context, seed=seed)
    name, equals, path = text.partition("=")
    if equals and name in readers.FORMATS:
        return readers.read(Path(path), name)
    if equals and not Path(text).exists():
        known = ", ".join(readers.FORMATS)
        raise ConfigError(
            f"--workload does not know the format {name!r}; give PATH or FORMAT=PATH, formats are {known}"
        )
    return readers.read(Path(text))


def load_all(
    texts: Sequence[str], *, vocab_size: int, max_context: int | None = None, seed: int = 0, limit: int | None = None
) -> list[Workload]:
    """Several workloads with names of their own; none given is the bundled one.

    Raises:
        ConfigError, PromptError: see `load`.
    """
    need(limit is None or limit >= 1, "--limit", "be 1 or more", limit)
    found: list[Workload] = []
    for text in texts or [BUNDLED]:
        one = load(text, vocab_size=vocab_size, max_context=max_context, seed=seed).limited(limit)
        same = sum(other.name == one.name or other.name.startswith(f"{one.name}#") for other in found)
        found.append(replace(one, name=f"{one.name}#{same + 1}") if same else one)
    return found


def bundled() -> Workload:
    """The prompts that ship with the package; none of them was trained on."""
    from paceline.bench.demo import bundled_prompts

    made = [
        Conversation(id=prompt.id, task="repetition" if prompt.repetitive else prompt.task, turns=(prompt.prompt,))
        for prompt in bundled_prompts()
    ]
    return Workload(name=BUNDLED, format=BUNDLED, source="prompts.jsonl", conversations=tuple(made))
