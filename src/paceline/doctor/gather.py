"""The doctor gathers the facts of a setup: machine, checkpoints, a probe of every drafter; and runs every check."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from packaging.requirements import Requirement

from paceline import registry
from paceline.assembly import MemoryUse, memory_use
from paceline.checkpoints import Tokenizer, resolve
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.controllers import Controller, Plan, Signal
from paceline.doctor.checks import Diagnosis, diagnose
from paceline.doctor.facts import DraftFacts, MachineFacts, ProbedToken, ProbeFacts, SetupFacts, TargetFacts
from paceline.doctor.passes import pass_facts
from paceline.doctor.setup_report import about
from paceline.engine import Probe as PassTimer
from paceline.engine import StepRecord, watching
from paceline.errors import ConfigError, PacelineError
from paceline.llm import BUNDLED, LLM
from paceline.models import Runner
from paceline.tree import NO_BUDGET, Budget, Verdict

ROOT = Path("/")
USUAL_NODES = 8
"""Drafted tokens of a text, by which memory is predicted."""

WATCHED = 0.3
"""Seconds of sleep in which the others' load is measured."""


def gather(pass_seconds: Mapping[int, float], root: Path = ROOT) -> MachineFacts:
    """Look at the machine as it is now.

    Args:
        pass_seconds: number of threads -> seconds of a pass of the target, measured before.
        root: of the file system.
    """
    import torch

    cpus = allowed_cpus()
    memory = psutil.virtual_memory()
    packages, unfit = versions()
    return MachineFacts(
        threads=torch.get_num_threads(),
        cpus=len(cpus),
        cores=cores(cpus, root),
        quota=quota(root),
        load=load(cpus),
        pass_seconds=pass_seconds,
        memory_total=memory.total,
        memory_available=memory.available,
        swapped=swapped(root),
        gpu=gpu(root),
        cuda=torch.cuda.is_available(),
        cuda_build=torch.version.cuda,
        versions=packages,
        unfit=unfit,
    )


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores(cpus: frozenset[int], root: Path = ROOT) -> int:
    """Count the physical cores among some CPUs."""
    siblings = {_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    if None in siblings:
        return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    return len(siblings)


def quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time of the process's control group, version 2 or 1; None without a limit."""
    groups = re.findall(r"^0::(/.*)$", _text(root / "proc/self/cgroup") or "", re.MULTILINE)
    base = root / "sys/fs/cgroup"
    limits = []
    for folder in {base, *(base / name.strip("/") for name in groups)}:
        words = (_text(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdecimal():
            limits.append(int(words[0]) / int(words[1]))
    microseconds, period = (_text(base / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if microseconds and period and microseconds.isdecimal():
        limits.append(int(microseconds) / int(period))
    return min(limits, default=None)


def load(cpus: frozenset[int]) -> float:
    """CPUs' worth of work on some CPUs while this process sleeps."""
    percent = psutil.cpu_percent(interval=WATCHED, percpu=True)
    return sum(value for cpu, value in enumerate(percent) if cpu in cpus) / 100


def swapped(root: Path = ROOT) -> int:
    """Bytes of this process in swap."""
    match = re.search(r"^VmSwap:\s*(\d+) kB", _text(root / "proc/self/status") or "", re.MULTILINE)
    return 1024 * int(match.group(1)) if match else 0


def gpu(root: Path = ROOT) -> str | None:
    """What shows that there is an NVIDIA GPU; None where nothing does."""
    if (root / "proc/driver/nvidia/version").exists():
        return "driver loaded"
    if sorted(root.glob("dev/nvidia[0-9]*")):
        return "/dev/nvidia0"
    return "nvidia-smi" if root == ROOT and shutil.which("nvidia-smi") else None


def versions() -> tuple[dict[str, tuple[str | None, str]], list[str]]:
    """What this package requires: name -> (installed, required), and the names that do not fit."""
    try:
        needed = [Requirement(line) for line in requires("paceline") or ()]
    except PackageNotFoundError:  # run from a folder that was not installed
        return {}, []
    versions_of: dict[str, tuple[str | None, str]] = {}
    for requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                versions_of[requirement.name] = (version(requirement.name), str(requirement.specifier))
            except PackageNotFoundError:
                versions_of[requirement.name] = (None, str(requirement.specifier))
    wanted = {requirement.name: requirement.specifier for requirement in needed}
    unfit = [
        name
        for name, (has, _) in versions_of.items()
        if has is None or not wanted[name].contains(has, prereleases=True)
    ]
    return versions_of, unfit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


TOKENS = 50
"""Of each probe, on each prompt."""

DEPTH = 4
"""num_speculative_tokens of the probes."""

CONTEXT = 64


class OnlyOne(Controller):
    """A controller that lets one drafter draft a fixed number of tokens, and the others nothing.

    Args:
        drafter: its number. drafters: how many there are.
    """

    name = "probe"

    def __init__(self, drafter: int, drafters: int) -> None:
        self.drafter, self.drafters = drafter, drafters

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Give the one drafter everything that may be drafted."""
        budgets = [Budget(DEPTH, DEPTH) if drafter == self.drafter else NO_BUDGET for drafter in range(self.drafters)]
        return Plan([budgets] * len(signals))


def pass_seconds(runner: Runner, threads: Sequence[int]) -> dict[int, float]:
    """Number of threads -> least seconds of one pass over one row; PyTorch's number is given back."""
    import torch

    before, seconds = torch.get_num_threads(), {}
    try:
        for number in threads:
            torch.set_num_threads(number)
            (seconds[number],) = PassTimer(runner)([1], CONTEXT)
    finally:
        torch.set_num_threads(before)
    return seconds


Progress = Callable[[str, int, int], None]


def probe(
    llm: LLM, prompts: Sequence[Any], *, tokens: int = TOKENS, progress: Progress = lambda stage, done, total: None
) -> list[ProbeFacts]:
    """One probe per drafter of a configuration: greedy, ends of texts ignored.

    Args:
        llm: with the configuration in question.
        prompts: as for `LLM.generate`, one after the other.
        progress: told (stage, done, total).
    """
    timer = PassTimer(llm.runner)
    rows = min(DEPTH + 1, llm.runner.info.max_context // 4)
    seconds = dict(zip((1, rows), timer((1, rows), CONTEXT), strict=True))
    drafter_set = llm.engine.parts.drafter_set
    probes = []
    for number, method in enumerate(llm.drafter_methods):
        progress("probing drafters", number, len(llm.drafter_methods))
        probed = llm.with_speculative_config(llm.speculative and llm.speculative.without_learning())
        probed.engine.use_controller(OnlyOne(number, len(drafter_set.names)))
        records, dropped = _decode(probed, prompts, tokens)
        drafter, kind = drafter_set.drafters[number], registry.lookup("drafters", method).kind
        spent = [r.draft_seconds[number] / tree.max_depth for r in records for tree in r.proposed if len(tree)]
        probes.append(
            ProbeFacts(
                drafter=drafter_set.names[number],
                kind=kind,
                taps=tuple(drafter.taps),
                drafted_tokens=[token for record in records for token in drafted_tokens(record)],
                draft_seconds=median(spent[1:] or spent) if spent else 0.0,
                target_seconds=seconds,
                dropped=dropped,
                note=drafter.note,
            )
        )
    progress("probing drafters", len(probes), len(probes))
    return probes


def _decode(llm: LLM, prompts: Sequence[Any], tokens: int) -> tuple[list[StepRecord], str]:
    records: list[StepRecord] = []
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    dropped = ""
    with watching(llm.engine, records.append):
        for prompt in prompts:
            (output,) = llm.generate(prompt, params)
            output.raise_for_error()
            dropped = dropped or next(iter(output.metrics.dropped_drafters.values()), "")
    return records, dropped


def drafted_tokens(record: StepRecord) -> list[ProbedToken]:
    """What was drafted on the path that the target took, as far as there were drafts, for every sequence of a step."""
    path_tokens = []
    for tree, verdict in zip(record.trees, record.verdicts, strict=True):
        if not isinstance(verdict, Verdict) or not len(tree):
            continue
        tokens, parents, confidence = tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.tolist()
        for position, target in enumerate(verdict.tokens, 1):
            parent = verdict.path[position - 2] if position > 1 else -1
            children = [node for node, above in enumerate(parents) if above == parent]
            if not children:
                break
            hit = position <= len(verdict.path)
            first = children[0]
            path_tokens.append(ProbedToken(position, tokens[first], target, hit, confidence[first]))
    return path_tokens


@dataclass(frozen=True, slots=True)
class Visit:
    """Holds what was seen of a setup, and what is wrong with it."""

    facts: SetupFacts
    diagnosis: Diagnosis

    def to_dict(self, llm: LLM) -> dict[str, Any]:
        """JSON-ready: findings, the figures behind them, and what a report should say of the setup of `llm`."""
        facts, machine = self.facts, self.facts.machine
        probes = [
            {
                "drafter": probe.drafter,
                "note": probe.note,
                "drafted_tokens": len(probe.drafted_tokens),
                "accepted": sum(token.hit for token in probe.drafted_tokens),
                "draft_seconds_per_token": probe.draft_seconds,
                "target_seconds_by_rows": {str(rows): seconds for rows, seconds in probe.target_seconds.items()},
            }
            for probe in facts.probes
        ]
        return {
            "healthy": self.diagnosis.healthy,
            "findings": [
                {"check": name, "what": finding.what, "do": finding.do, "level": "hint" if finding.hint else "wrong"}
                for name, finding in self.diagnosis.findings
            ],
            "checks": list(self.diagnosis.asked),
            "about": dict(about(llm, facts)),
            "probes": probes,
            "memory": None if facts.memory is None else facts.memory.to_dict(),
            "passes": None if facts.passes is None else asdict(facts.passes),
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
    progress: Progress = lambda stage, done, total: None,
    told: Callable[[Diagnosis], None] = lambda diagnosis: None,
) -> Visit:
    """Measure, and run the checks.

    Args:
        llm: the target, loaded; its own speculative_config plays no part.
        config: the speculative_config in question.
        prompts: for the probes, as for `LLM.generate`.
        progress: told (stage, done, total).
        told: what each stage's checks have found, as soon as they have.
    Raises:
        ConfigError: a configuration that is no configuration.
    """
    parsed = SpeculativeConfig.parse(config)
    bundled = Path(llm.runner.info.name) == BUNDLED / "target"
    progress("looking at the machine", 0, 1)
    drafts = [open_draft(name) for name in draft_names(parsed, bundled=bundled)]
    automatic = parsed is not None and parsed.method == "auto"
    facts = SetupFacts(machine=_machine(llm), target=_target(llm), drafts=drafts, automatic=automatic)
    progress("looking at the machine", 1, 1)
    told(diagnose(facts, ["machine"]))
    progress("timing passes", 0, 1)
    facts = replace(facts, passes=pass_facts(llm.runner))
    progress("timing passes", 1, 1)
    told(diagnose(facts, ["passes"]))
    try:
        if parsed is not None:
            drafting = llm.with_speculative_config(parsed)
            facts = replace(facts, memory=_memory(drafting))
            facts = replace(facts, probes=probe(drafting, prompts, progress=progress))
    except PacelineError as problem:
        facts = replace(facts, error=str(problem))
    told(diagnose(facts, ["probes"]))
    return Visit(facts, diagnose(facts))


def draft_names(config: SpeculativeConfig | None, *, bundled: bool) -> list[str]:
    """The draft models that a configuration uses; those of the bundled model where it names none."""
    if config is None:
        return []
    entries = [config] if isinstance(config.method, str) else list(config.method)
    named = [entry.model for entry in entries if entry.model is not None and entry.method not in ("tli", "slem")]
    shipped = (
        [str(BUNDLED / "draft")]
        if bundled and any(e.model is None and e.method in ("auto", "draft_model") for e in entries)
        else []
    )
    return list(dict.fromkeys([*named, *shipped]))


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
        seconds = pass_seconds(llm.runner, list(dict.fromkeys([now, max(1, now // 2), 1])))
    return gather(seconds)


def _memory(llm: LLM) -> MemoryUse | None:
    """Of the longest text, with as many drafts as are common; None where memory is not counted."""
    try:
        drafters = llm.engine.parts.drafter_set.drafters
        return memory_use(llm.runner, drafters, [llm.runner.info.max_context - USUAL_NODES], USUAL_NODES)
    except ConfigError:
        return None


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
