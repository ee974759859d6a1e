"""The doctor: gathers the facts of a setup and asks every check about them.

In: a target loaded without drafts, its folder, a speculative_config. Out: Facts and a Diagnosis. Not here: the checks
(`bench.checks` and its neighbours), printing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.doctor import machine_facts, probing
from paceline.bench.doctor.checks import Diagnosis, diagnose
from paceline.bench.doctor.facts import DraftFacts, Facts, MachineFacts, ProbeFacts, TargetFacts
from paceline.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.llm import BUNDLED, LLM
from paceline.models.loading import Tokenizer, resolve

BUNDLED_TARGET, BUNDLED_DRAFT = BUNDLED / "target", BUNDLED / "draft"


@dataclass(frozen=True, slots=True)
class Visit:
    """What was seen, and what is wrong."""

    facts: Facts
    diagnosis: Diagnosis

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: findings, and the figures behind them."""
        facts, machine = self.facts, self.facts.machine
        probes = [
            {
                "drafter": probe.drafter,
                "guesses": len(probe.guesses),
                "accepted": sum(guess.hit for guess in probe.guesses),
                "draft_seconds_per_token": probe.draft_seconds,
                "target_seconds_by_rows": {str(rows): seconds for rows, seconds in probe.target_seconds.items()},
            }
            for probe in facts.probes
        ]
        return {
            "healthy": self.diagnosis.healthy,
            "findings": [
                {"check": name, "what": found.what, "do": found.do, "level": "hint" if found.hint else "wrong"}
                for name, found in self.diagnosis.findings
            ],
            "checks": list(self.diagnosis.asked),
            "probes": probes,
            "machine": {
                "threads": machine.threads,
                "cpus": machine.cpus,
                "cores": machine.cores,
                "quota": machine.quota,
                "load": round(machine.load, 2),
                "pass_seconds_by_threads": {str(number): seconds for number, seconds in machine.pass_seconds.items()},
                "memory_available": machine.memory_available,
                "swapped": machine.swapped,
                "versions": {name: installed for name, (installed, _) in machine.versions.items()},
            },
        }


def visit(
    llm: LLM,
    config: Mapping[str, Any] | str | SpeculativeConfig | None,
    prompts: Sequence[Any],
    progress: probing.Progress = lambda stage, done, total: None,
) -> Visit:
    """Measure and ask.

    Args:
        llm: the target, loaded; its own speculative_config plays no part.
        config: the speculative_config in question.
        prompts: for the probes, as for `LLM.generate`.
        progress: told (stage, done, total).
    Raises:
        ConfigError: a configuration that is no configuration.
    """
    parsed = SpeculativeConfig.parse(config)
    drafts = [open_draft(name) for name in draft_names(parsed, bundled=Path(llm.runner.info.name) == BUNDLED_TARGET)]
    probes: list[ProbeFacts] = []
    error = ""
    try:
        if parsed is not None:
            probes = probing.probe(llm.with_speculative_config(parsed), prompts, progress=progress)
    except PacelineError as problem:
        error = str(problem)
    progress("timing passes", 0, 1)
    machine = _machine(llm)
    progress("timing passes", 1, 1)
    facts = Facts(machine=machine, target=_target(llm), drafts=drafts, probes=probes, error=error)
    return Visit(facts, diagnose(facts))


def draft_names(config: SpeculativeConfig | None, *, bundled: bool) -> list[str]:
    """The draft models that a configuration uses; those of the bundled model where it names none."""
    if config is None:
        return []
    entries = [config] if isinstance(config.method, str) else list(config.method)
    named = [entry.model for entry in entries if entry.model is not None and entry.method not in ("tli", "slem")]
    own = (
        [str(BUNDLED_DRAFT)]
        if bundled and any(e.model is None and e.method in ("auto", "draft_model") for e in entries)
        else []
    )
    return list(dict.fromkeys([*named, *own]))


def open_draft(name: str) -> DraftFacts:
    """A draft's tokenizer, or why it cannot be read."""
    try:
        return DraftFacts(name=name, tokenizer=Tokenizer.load(resolve(name)))
    except PacelineError as error:
        return DraftFacts(name=name, tokenizer=None, error=str(error))


def _machine(llm: LLM) -> MachineFacts:
    import torch

    seconds: dict[int, float] = {}
    if llm.runner.info.device.type == "cpu":
        now = torch.get_num_threads()
        seconds = probing.pass_seconds(llm.runner, list(dict.fromkeys([now, max(1, now // 2), 1])))
    return machine_facts.gather(seconds)


def _target(llm: LLM) -> TargetFacts:
    info = llm.runner.info
    return TargetFacts(
        device=info.device.type,
        dtype=str(info.dtype).removeprefix("torch."),
        num_layers=info.num_layers,
        weight_bytes=info.weight_bytes,
        tokenizer=llm.tokenizer,
        eos_ids=llm.defaults.eos_ids,
        sampling=llm.defaults.sampling,
    )
