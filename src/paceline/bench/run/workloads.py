"""What a benchmark decodes: conversations from prompt files, made up, or shipped with the package.

    PATH                     the format is recognised by its content
    FORMAT=PATH              the format is named, one of `paceline.utils.PROMPT_FORMATS`
    synthetic:KEY=VALUE,...  token ids of a given number and entropy
    bundled                  the prompts that ship with the package

Synthetic tokens are independent draws from p(rank) ~ 1 / rank^s over a random order of the vocabulary; s is solved for
the wanted entropy in bits a token. log2(vocabulary) gives the uniform distribution, 0 one token over and over. Low
entropy makes text repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.utils import PROMPT_FORMATS, Conversation, Workload, need, read_prompts, reject_unknown

BUNDLED = "bundled"
SYNTHETIC = "synthetic"


def load_workload(text: str, *, vocab_size: int = 0, max_context: int | None = None, seed: int = 0) -> Workload:
    """The workload that `text` names (see the module's docstring).

    Args:
        vocab_size, max_context: of the model, for synthetic prompts; None takes any length.
        seed: of synthetic prompts.
    Raises:
        ConfigError: an unknown format or parameter.
        PromptError: a file that cannot be read, or not in its format.
    """

    if text == BUNDLED:
        return bundled_workload()
    kind, colon, rest = text.partition(":")
    if kind == SYNTHETIC and (colon or not Path(text).exists()):
        return load_synthetic(rest, vocab_size=vocab_size, max_context=max_context, seed=seed)
    name, equals, path = text.partition("=")
    if equals and name in PROMPT_FORMATS:
        return read_prompts(Path(path), name)
    if equals and not Path(text).exists():
        known = ", ".join(PROMPT_FORMATS)
        raise ConfigError(f"unknown format {name!r} of --workload; give PATH or FORMAT=PATH, formats are {known}")
    return read_prompts(Path(text))


def load_workloads(
    texts: Sequence[str], *, vocab_size: int, max_context: int | None = None, seed: int = 0, limit: int | None = None
) -> list[Workload]:
    """Several workloads with names of their own; none given is the bundled one.

    Raises:
        ConfigError, PromptError: see `load`.
    """
    need(limit is None or limit >= 1, "--limit", "be 1 or more", limit)
    workloads: list[Workload] = []
    for text in texts or [BUNDLED]:
        workload = load_workload(text, vocab_size=vocab_size, max_context=max_context, seed=seed).limited(limit)
        same = sum(other.name == workload.name or other.name.startswith(f"{workload.name}#") for other in workloads)
        workloads.append(replace(workload, name=f"{workload.name}#{same + 1}") if same else workload)
    return workloads


def bundled_workload() -> Workload:
    """The prompts that ship with the package; none of them was trained on."""
    from paceline.bench.bundled import bundled_prompts

    conversations = [
        Conversation(id=prompt.id, task="repetition" if prompt.repetitive else prompt.task, turns=(prompt.prompt,))
        for prompt in bundled_prompts()
    ]
    return Workload(name=BUNDLED, format=BUNDLED, source="prompts.jsonl", conversations=tuple(conversations))


DEFAULTS = {"prompt": 128, "output": 64, "entropy": -1.0, "count": 8}
STEEPEST = 64.0
"""Exponent at which all but the first token is gone: entropy below 1e-18 bits."""


def load_synthetic(text: str, *, vocab_size: int, max_context: int | None = None, seed: int = 0) -> Workload:
    """The workload of "prompt=128,output=64,entropy=6.5,count=8".

    What is left out takes DEFAULTS, entropy the uniform distribution's.

    Args:
        max_context: of the model; a prompt must leave room for one new token. None takes any length.
    Raises:
        ConfigError: an unknown key or a value outside its range.
    """
    values = _parse(text)
    for key in ("prompt", "output", "count"):
        need(
            values[key] == int(values[key]) and values[key] >= 1,
            f"synthetic {key}",
            "be an integer of 1 or more",
            values[key],
        )
    if max_context is not None:
        rule = f"be at most {max_context - 1}: the context holds {max_context} tokens including at least one new token"
        need(values["prompt"] < max_context, "synthetic prompt", rule, int(values["prompt"]))
    highest = float(np.log2(max(vocab_size, 1)))
    entropy = highest if values["entropy"] < 0 else values["entropy"]
    need(
        entropy <= highest + 1e-9,
        "synthetic entropy",
        f"be at most {highest:.4g} bits, log2 of the vocabulary",
        entropy,
    )
    tokens = synthetic_prompts(int(values["count"]), int(values["prompt"]), min(entropy, highest), vocab_size, seed)
    task = f"{int(values['prompt'])}+{int(values['output'])} tokens, {entropy:.3g} bits"
    conversations = [
        Conversation(id=f"synthetic-{i}", task=task, chat=False, token_ids=tuple(row), max_tokens=int(values["output"]))
        for i, row in enumerate(tokens.tolist(), 1)
    ]
    source = ",".join(f"{key}={value:g}" for key, value in {**values, "entropy": entropy}.items())
    return Workload(name=SYNTHETIC, format=SYNTHETIC, source=source, conversations=tuple(conversations))


def _parse(text: str) -> dict[str, float]:
    values: dict[str, float] = dict(DEFAULTS)
    seen: set[str] = set()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        reject_unknown("synthetic", {key: value}, list(DEFAULTS))
        need(key not in seen, f"synthetic {key}", "be given once", text)
        seen.add(key)
        try:
            values[key] = float(value)
        except ValueError:
            raise ConfigError(f"synthetic {key} must be a number, got {value!r}") from None
        need(np.isfinite(values[key]) and values[key] >= 0, f"synthetic {key}", "be 0 or more", value)
    return values


def token_distribution(entropy: float, size: int) -> npt.NDArray[np.float64]:
    """(size,) probabilities by rank, 1 / rank^s, whose entropy is `entropy` bits within 1e-6."""
    ranks = np.log(np.arange(1, size + 1, dtype=np.float64))
    low, high = 0.0, STEEPEST
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy(_zipf(ranks, middle)) > entropy else (low, middle)
    return _zipf(ranks, (low + high) / 2)


def _zipf(log_ranks: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    weights = np.exp(-exponent * log_ranks)
    return np.asarray(weights / weights.sum())


def _entropy(p: npt.NDArray[np.float64]) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def synthetic_prompts(count: int, length: int, entropy: float, vocab_size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(count, length) token ids, every prompt with an order of the vocabulary of its own.

    The same seed gives the same.
    """
    p, rng = token_distribution(entropy, vocab_size), np.random.default_rng(seed)
    return np.stack([rng.permutation(vocab_size)[rng.choice(vocab_size, length, p=p)] for _ in range(count)])
