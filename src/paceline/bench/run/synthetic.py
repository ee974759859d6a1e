"""Made-up prompts: so many token ids, drawn from a law of a given entropy, with an output of a given length.

In: parameters and a vocabulary size. Out: a Workload whose prompts are token ids. Not here: random-weights models
(`bench.random_model`).

Tokens are independent draws from p(rank) ~ 1 / rank^s over a random order of the vocabulary; s is solved for the wanted
entropy in bits a token. log2(vocabulary) gives the uniform law, 0 one token over and over. Low entropy makes text
repeat itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.bench.run.workloads import SYNTHETIC
from paceline.errors import ConfigError
from paceline.utils import Conversation, Workload, need, reject_unknown

DEFAULTS = {"prompt": 128, "output": 64, "entropy": -1.0, "count": 8}
STEEPEST = 64.0
"""Exponent at which all but the first token is gone: entropy below 1e-18 bits."""


def load_synthetic(text: str, *, vocab_size: int, max_context: int | None = None, seed: int = 0) -> Workload:
    """The workload of "prompt=128,output=64,entropy=6.5,count=8"; what is left out takes DEFAULTS, entropy the uniform
    law's.

    Args:
        max_context: of the model; a prompt must leave room for one new token. None takes any length.
    Raises:
        ConfigError: an unknown key or a value outside its range.
    """
    given = _parse(text)
    for key in ("prompt", "output", "count"):
        need(
            given[key] == int(given[key]) and given[key] >= 1,
            f"synthetic {key}",
            "be an integer of 1 or more",
            given[key],
        )
    if max_context is not None:
        rule = f"be at most {max_context - 1}: the context holds {max_context} tokens including at least one new token"
        need(given["prompt"] < max_context, "synthetic prompt", rule, int(given["prompt"]))
    highest = float(np.log2(max(vocab_size, 1)))
    entropy = highest if given["entropy"] < 0 else given["entropy"]
    need(
        entropy <= highest + 1e-9,
        "synthetic entropy",
        f"be at most {highest:.4g} bits, log2 of the vocabulary",
        entropy,
    )
    tokens = synthetic_prompts(int(given["count"]), int(given["prompt"]), min(entropy, highest), vocab_size, seed)
    task = f"{int(given['prompt'])}+{int(given['output'])} tokens, {entropy:.3g} bits"
    made = [
        Conversation(id=f"synthetic-{i}", task=task, chat=False, token_ids=tuple(row), max_tokens=int(given["output"]))
        for i, row in enumerate(tokens.tolist(), 1)
    ]
    source = ",".join(f"{key}={value:g}" for key, value in {**given, "entropy": entropy}.items())
    return Workload(name=SYNTHETIC, format=SYNTHETIC, source=source, conversations=tuple(made))


def _parse(text: str) -> dict[str, float]:
    given: dict[str, float] = dict(DEFAULTS)
    seen: set[str] = set()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        reject_unknown("synthetic", {key: value}, list(DEFAULTS))
        need(key not in seen, f"synthetic {key}", "stand there once", text)
        seen.add(key)
        try:
            given[key] = float(value)
        except ValueError:
            raise ConfigError(f"synthetic {key} must be a number, got {value!r}") from None
        need(np.isfinite(given[key]) and given[key] >= 0, f"synthetic {key}", "be 0 or more", value)
    return given


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
    """(count, length) token ids, every prompt with an order of the vocabulary of its own; the same seed gives the
    same.
    """
    p, rng = token_distribution(entropy, vocab_size), np.random.default_rng(seed)
    return np.stack([rng.permutation(vocab_size)[rng.choice(vocab_size, length, p=p)] for _ in range(count)])
