"""AdaDec's threshold: from which entropy on a model's likeliest token is not to be trusted, learned from texts.

Source: Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance (arXiv:2506.08980), which
learns from solutions of programming tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tqdm.auto import tqdm

from paceline.errors import ConfigError
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.models import Runner

CHUNK: Final = 128
"""Tokens of a pass, and rows of logits at once."""
FEWEST: Final = 10
"""Places of each kind, right and wrong."""


def entropies_of(runner: Runner, texts: Iterable[tuple[Sequence[int], int]]) -> tuple[list[float], list[bool]]:
    """What a model says along texts that are right: at each place the entropy of its next-token distribution in nats,
    without any rule, and whether the likeliest token is the one that stands there.

    Args:
        texts: tokens, and the number of the first one that counts, 1 or more.
    """
    entropies, right = list[float](), list[bool]()
    for tokens, first in tqdm(list(texts), desc="reading texts", disable=None):
        cache = runner.open()
        try:
            for start in range(0, len(tokens) - 1, CHUNK):
                chunk, follows = tokens[start : start + CHUNK], tokens[start + 1 : start + CHUNK + 1]
                logits = runner.extend([cache], [chunk], all_logits=True).logits[: len(follows)].float()
                logprobs, skipped = logits.log_softmax(-1).cpu(), max(0, first - 1 - start)
                entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
                hits = logprobs.argmax(-1) == torch.tensor(follows)
                entropies += entropy.clamp(min=0.0)[skipped:].tolist()
                right += hits[skipped:].tolist()
        finally:
            runner.release(cache)
    return entropies, right


def learned_threshold(entropies: Sequence[float], right: Sequence[bool], *, seed: int = 0) -> float:
    """The entropy from which on a model's likeliest token is not to be trusted.

    A logistic regression of `right` on the entropy, on as many right as wrong places, and the cut q of its probability
    in 0.01 to 0.99 that tells a held-out fifth apart best: the entropy where the probability is q.

    Args:
        entropies: nats, of the model's next-token distribution at places of texts; right: whether its likeliest token
            was the text's (see `entropies_of`).
        seed: of the choice of places.
    Raises:
        ConfigError: entropies that are no finite numbers of 0 or more, something else than truth values, not as many
            of one as of the other, fewer than 10 places of a kind, or entropies that are no lower where it is right.
    """
    x, y = _checked(entropies, right)
    integer("seed", seed, 0)
    generator = np.random.default_rng(seed)
    size = min(int(y.sum()), int((~y).sum()))
    if size < FEWEST:
        raise ConfigError(f"{FEWEST} places of each kind are needed, right and wrong, got {size}; give more texts")
    picked = np.concatenate([generator.permutation(np.flatnonzero(kind))[:size] for kind in (y, ~y)])
    picked = generator.permutation(picked)
    held, rest = picked[: len(picked) // 5], picked[len(picked) // 5 :]
    slope, offset = _logistic(x[rest], y[rest])
    if slope >= 0.0 or x[y].mean() >= x[~y].mean():
        raise ConfigError(
            f"entropies must be lower where the likeliest token is right, got {x[y].mean():.3g} nats there and "
            f"{x[~y].mean():.3g} elsewhere (means); give other texts, or leave threshold as it is"
        )
    chance = 1 / (1 + np.exp(-(slope * x[held] + offset)))
    cuts = np.arange(0.01, 1.0, 0.01)
    q = cuts[np.argmax([np.mean((chance >= cut) == y[held]) for cut in cuts])]
    return max(0.0, float((np.log(q / (1 - q)) - offset) / slope))


def _checked(entropies: Sequence[float], right: Sequence[bool]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """As arrays (n,) of float64 and bool."""
    try:
        x = np.asarray(entropies, np.float64)
        fine = x.ndim == 1 and bool((np.isfinite(x) & (x >= 0.0)).all())
    except (TypeError, ValueError):
        fine = False
    need(fine, "entropies", "be finite numbers of 0 or more", entropies)
    try:
        y = np.asarray(right)
        fine = y.ndim == 1 and bool(np.isin(y, (0, 1)).all())
    except (TypeError, ValueError):
        fine = False
    need(fine, "right", "be truth values", right)
    need(len(x) == len(y), "right", f"have as many values as entropies ({len(x)})", len(y))
    return x, y.astype(bool)


def _logistic(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Slope and offset of the likeliest logistic curve, by Newton's method with a small ridge."""
    design, weights = np.stack([x, np.ones_like(x)], 1), np.zeros(2)
    for _ in range(50):
        chance = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        slope = design.T @ (y - chance) - 1e-6 * weights
        step = np.linalg.solve((design.T * (chance * (1 - chance))) @ design + 1e-6 * np.eye(2), slope)
        weights += np.clip(step, -5, 5)
        if np.abs(step).max() < 1e-10:
            break
    return float(weights[0]), float(weights[1])
