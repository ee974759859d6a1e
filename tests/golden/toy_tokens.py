"""Token ids and steps of every drafter, verifier and mode on the toy model of the contract suite.

A value is [tokens, steps]: a digit for each token (base 11), a comma between outputs; the target's passes of each
request. What decides by measured times has no steps.
"""

from __future__ import annotations

from typing import Any

from contract.test_exactness import options, store
from contract.worlds import NODES, PREDICTION, PROMPT, VOCAB, engine, letters, make, target, verifier
from drafters.test_contract import VARIANTS, named
from engine.harness import run, tokens
from toy_models import ToyModels
from toys import ToyRunner

from paceline import registry
from paceline.assembly import build_parts
from paceline.claims import Mode, cells
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.engine import Engine

LENGTH = 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "drawn": {"temperature": 0.8},
}
"""Requests without a seed of their own get one each from the engine, which is fixed here."""
CLAIMED: dict[str, Mode] = {"greedy": "greedy", "seeded": "seeded", "drawn": "sampled"}
"""The modes as claims call them."""
BATCHES = {"one": [PROMPT], "three": [PROMPT[2:] + PROMPT[:2], [5, 6, 5, 6, 7, 5, 6], [3]]}
AUTO: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto"},
    "auto with a draft model": {"method": "auto", "model": "toy"},
    "auto over tables": {"method": ["ngram", "suffix"], "controller": "auto"},
}


PREPARED = ("reflective", "judge")
"""Rules that are nothing before they are prepared for a model; tests compare their texts with their definitions."""
OF_ONE = {"lexical_units": "lud"}
"""Rules -> the only drafter that may be named beside them."""


def decoded(live: Engine, mode: str, batch: str) -> list[Any]:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **MODES[mode])
    requests = run(live, BATCHES[batch], params, prediction=PREDICTION)
    dropped = [request.metrics.dropped_drafters for request in requests if request.metrics.dropped_drafters]
    assert not dropped, dropped
    texts = ["".join(f"{token:x}" for token in outputs[0]) for outputs in tokens(requests)]
    return [",".join(texts), [request.metrics.num_steps for request in requests]]


def cell(drafter: str, own: dict[str, Any], sampled: str, mode: str, batch: str) -> list[Any]:
    runner = target()
    own = own | ({"datastore": store()} if "datastore" in own else {})
    own = own | ({"resume_verification": False} if "target_speedup" in own else {})
    rule = verifier(sampled)
    made = make(drafter, own, runner, chains_only=rule.chains_only)
    return decoded(engine([made], rule, runner=runner, nodes=NODES), mode, batch)


def built(given: dict[str, Any]) -> Engine:
    """As `LLM` builds it."""
    runner, draft = target(), ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=0.6)
    _, parts = build_parts(
        runner,
        SpeculativeConfig.parse(given),
        load=lambda name: draft,
        models=ToyModels(runner, draft),
        tokenizer=letters(),
    )
    return Engine(parts, EngineConfig(max_num_seqs=64), tokenizer=letters(), eos_ids=(0,))


def found(golden: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for mode in MODES:
        for batch in BATCHES:
            plain = made[f"plain, {mode}, {batch}"] = decoded(engine((), verifier("rejection_sampler")), mode, batch)
            for name, given in AUTO.items():
                if (
                    mode == "greedy" or "draft model" not in name
                ):  # which drafts are drawn, and so the tokens, is up to the clock
                    same = decoded(built(given), mode, batch)[0] == plain[0]
                    made[f"{name}, {mode}, {batch}"] = "plain's tokens" if same else "other tokens"
    claims = list(cells())
    for drafter in registry.DRAFTERS:
        for mode, batch in ((mode, batch) for mode in MODES for batch in BATCHES):
            decide = [one.verifier for one in claims if (one.drafter, one.mode) == (drafter, CLAIMED[mode])]
            for rule in (one for one in decide if one not in PREPARED and OF_ONE.get(one, drafter) == drafter):
                sampled = "rejection_sampler" if rule == "greedy" else rule
                made[f"{drafter}, {rule}, {mode}, {batch}"] = cell(drafter, options(drafter), sampled, mode, batch)
        for variant in VARIANTS.get(drafter, [{}])[1:]:
            for mode in ("greedy", "drawn"):
                made[f"{drafter} {named(variant)}, {mode}, three"] = cell(
                    drafter, variant, "rejection_sampler", mode, "three"
                )
    return made
