"""An engine over the toy runner, for tests of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toys import ToyRunner

from paceline.config import EngineConfig, SamplingParams
from paceline.controllers.policies import FixedController
from paceline.engine import DrafterSet, Engine, EngineParts, Request, check_prompt, truncated
from paceline.verifiers import GreedyVerifier, RecursiveRejection


def engine(
    runner: ToyRunner,
    drafters: Sequence[Any] = (),
    tokens: int = 0,
    *,
    sampled: Any = None,
    controller: Any = None,
    **sizes: Any,
) -> Engine:
    """An engine that drafts `tokens` tokens a step with each drafter."""
    drafter_set = DrafterSet(drafters, runner.info.vocab_size, chains_only=not runner.capabilities.trees)
    controller = controller or FixedController(tokens, drafters=drafter_set.names)
    controller.drafters = len(drafter_set.names)
    parts = EngineParts(runner, drafter_set, controller, GreedyVerifier(), sampled or RecursiveRejection())
    return Engine(parts, EngineConfig(**sizes), eos_ids=(0,))


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    seed: int | Sequence[int] = 7,
    *,
    prediction: Sequence[int] = (),
) -> list[Request]:
    """Decode prompts to their ends; request i has seed `seed + i`, or its own; all have the same prediction."""
    seeds = range(seed, seed + len(prompts)) if isinstance(seed, int) else seed
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    info = engine.parts.runner.info
    requests = []
    for i, (p, q, s) in enumerate(zip(prompts, each, seeds, strict=True)):
        prompt = truncated(list(p), q, info.max_context)
        room = check_prompt(prompt, info.vocab_size, info.max_context, q.max_tokens)
        requests.append(Request(f"r{i}", None, prompt, q, s, room))
    for request in requests:
        request.prediction = list(prediction)
        engine.add(request)
    while engine.has_work:
        engine.step()
    return requests


def tokens(requests: Sequence[Request]) -> list[list[list[int]]]:
    """Token ids of every output of every request."""
    return [[output.token_ids for output in request.outputs] for request in requests]
