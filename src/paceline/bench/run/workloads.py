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

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.utils import PROMPT_FORMATS, Conversation, Workload, need, read_prompts

BUNDLED = "bundled"
SYNTHETIC = "synthetic"


def load_workload(text: str, *, vocab_size: int = 0, max_context: int | None = None, seed: int = 0) -> Workload:
    """The workload that `text` names (see the module's docstring).

    Args:
        vocab_size, max_context: of the model, for synthetic prompts; None takes any length.
        seed: of synthetic prompts.
    Raises:
        ConfigError: an unknown format or parameter. PromptError: a file that cannot be read, or not in its format.
    """
    from paceline.bench.run import synthetic

    if text == BUNDLED:
        return bundled_workload()
    kind, colon, rest = text.partition(":")
    if kind == SYNTHETIC and (colon or not Path(text).exists()):
        return synthetic.load_synthetic(rest, vocab_size=vocab_size, max_context=max_context, seed=seed)
    name, equals, path = text.partition("=")
    if equals and name in PROMPT_FORMATS:
        return read_prompts(Path(path), name)
    if equals and not Path(text).exists():
        known = ", ".join(PROMPT_FORMATS)
        raise ConfigError(
            f"--workload does not know the format {name!r}; give PATH or FORMAT=PATH, formats are {known}"
        )
    return read_prompts(Path(text))


def load_workloads(
    texts: Sequence[str], *, vocab_size: int, max_context: int | None = None, seed: int = 0, limit: int | None = None
) -> list[Workload]:
    """Several workloads with names of their own; none given is the bundled one.

    Raises:
        ConfigError, PromptError: see `load`.
    """
    need(limit is None or limit >= 1, "--limit", "be 1 or more", limit)
    found: list[Workload] = []
    for text in texts or [BUNDLED]:
        one = load_workload(text, vocab_size=vocab_size, max_context=max_context, seed=seed).limited(limit)
        same = sum(other.name == one.name or other.name.startswith(f"{one.name}#") for other in found)
        found.append(replace(one, name=f"{one.name}#{same + 1}") if same else one)
    return found


def bundled_workload() -> Workload:
    """The prompts that ship with the package; none of them was trained on."""
    from paceline.bench.demo import bundled_prompts

    made = [
        Conversation(id=prompt.id, task="repetition" if prompt.repetitive else prompt.task, turns=(prompt.prompt,))
        for prompt in bundled_prompts()
    ]
    return Workload(name=BUNDLED, format=BUNDLED, source="prompts.jsonl", conversations=tuple(made))
