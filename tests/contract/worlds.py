"""Toy worlds for the exactness table: every drafter of the registry over a table-driven target, with a tokenizer of
letters. Toy logits are exact: "up to near ties" means equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from engine.harness import run
from toy_models import ToyModels, letters, nested
from toys import ToyRunner

from paceline import registry
from paceline.assembly.build import ExactJudge
from paceline.config import EngineConfig, SamplingParams
from paceline.controllers.policies import FixedController
from paceline.drafters import DrafterArgs
from paceline.engine import DrafterSet, Engine, EngineParts
from paceline.verifiers import GreedyVerifier

VOCAB = 11
NODES = 12
SEED = 7
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
PREDICTION = ToyRunner(VOCAB, seed=3, sharpness=1.5).greedy(PROMPT, 24)
"""What every request says it expects: right for PROMPT at temperature 0."""

BATCHES: dict[str, list[list[int]]] = {
    "alone": [PROMPT],
    "together": [PROMPT[2:] + PROMPT[:2], [5, 6, 5, 6, 7, 5, 6, 5, 6, 7], [9] * 10, [3], PROMPT * 3],
}


def target(seed: int = 3, sharpness: float = 1.5, pad: int = 0) -> ToyRunner:
    """The model; `pad` more ids have large logits and are no tokens of its tokenizer."""
    return ToyRunner(VOCAB, seed=seed, sharpness=sharpness, pad=pad)


RESUMING: dict[str, dict[str, Any]] = {
    "layer_skip": {"resume_verification": True},
    "del": {"resume_verification": True},
    "kangaroo": {"resume_verification": True},
}
"""Options that are fixed here, where a measurement would choose."""

loaded = cache(registry.load)
"""Classes by name; asking the installed packages each time takes longer than a cell."""


def make(name: str, options: dict[str, Any], runner: ToyRunner, *, chains_only: bool = False) -> Any:
    """A drafter of the registry; its draft model is a noisy copy of the target."""
    draft = ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=0.6)
    args = DrafterArgs(
        vocab_size=runner.info.vocab_size,
        index=0,
        max_context=4096,
        target=runner,
        load_runner=lambda name: draft,
        models=ToyModels(runner, draft),
        nested=lambda config: nested(config, args),
        judge=ExactJudge(),
        fingerprint=letters().fingerprint,
        chains_only=chains_only,
    )
    return loaded("drafters", name)(args, **(RESUMING.get(name, {}) | options))


def verifier(name: str) -> Any:
    return loaded("verifiers", name)()


def engine(drafters: Sequence[Any], sampled: Any, *, runner: ToyRunner | None = None, nodes: int = NODES) -> Engine:
    runner = runner or target()
    parts = EngineParts(
        runner,
        DrafterSet(drafters, runner.info.vocab_size, chains_only=sampled.chains_only),
        FixedController(nodes if drafters else 0),
        sampled.at_zero() or GreedyVerifier(),
        sampled,
    )
    return Engine(parts, EngineConfig(max_num_seqs=64), tokenizer=letters(), eos_ids=(0,))


def decoded(live: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int = SEED) -> list[Any]:
    """All that a caller sees of every output; request i has seed `seed + i`."""
    seeds = range(seed, seed + len(prompts))
    return [output for one in requested(live, prompts, [params] * len(prompts), seeds) for output in one]


def requested(
    live: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[list[Any]]:
    """All that a caller sees of every output of every request."""
    found = run(live, prompts, params, seeds, prediction=PREDICTION)
    assert not any(request.metrics.dropped_drafters for request in found), found[0].metrics.dropped_drafters
    return [
        [
            (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, request.prompt_logprobs)
            for o in request.outputs
        ]
        for request in found
    ]


def accepted(live: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """How many drafted tokens were accepted."""
    return sum(request.metrics.num_accepted_tokens for request in run(live, prompts, params, prediction=PREDICTION))
