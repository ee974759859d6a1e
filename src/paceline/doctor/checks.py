"""The doctor's checks as one list: of the machine, of checkpoints, of drafters by a probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from paceline.checkpoints import Tokenizer, same_tokenizer
from paceline.doctor.facts import Complaint, DraftFacts, FormFacts, ProbedToken, ProbeFacts, SetupFacts
from paceline.errors import PacelineError
from paceline.models.passes import eligibility

CLEARLY: Final = 0.9
"""Part of the time of the form that runs the target, below which another one is clearly faster."""

SLOWER: Final = 1.15
"""Threads that make a pass this many times slower than fewer of them are in each other's way."""

SPARE: Final = 0.5
"""CPUs' worth of other work that does not matter."""

LOW: Final = 0.05
"""Share of the memory that should stay available."""

SWAPPED: Final = 0.01
"""Share of the weights; more than this of the process in swap is read from disk again and again."""


def versions(facts: SetupFacts) -> Iterator[Complaint]:
    """Packages that are missing or older than required."""
    for name in facts.machine.unfit:
        installed, required = facts.machine.versions[name]
        yield Complaint(
            f"{name} is {installed or 'missing'}, but {required} is needed", f"pip install '{name}{required}'"
        )


def gpu(facts: SetupFacts) -> Iterator[Complaint]:
    """A GPU that PyTorch cannot use, or that is there and not used."""
    machine = facts.machine
    if machine.gpu is not None and not machine.cuda:
        why = "is a CPU build" if machine.cuda_build is None else f"(CUDA {machine.cuda_build}) cannot open it"
        do = "install a CUDA build of torch" if machine.cuda_build is None else "check the driver with nvidia-smi"
        yield Complaint(f"there is a GPU ({machine.gpu}), but PyTorch {why}", do)
    elif machine.cuda and facts.target.device == "cpu":
        yield Complaint("PyTorch can use a GPU, but the model runs on the CPU", "use --device cuda", hint=True)


def passes(facts: SetupFacts) -> Iterator[Complaint]:
    """Compiled passes that do not run here, or that were measured to be slower than PyTorch's operators."""
    if facts.passes is not None and facts.passes.fault is not None:
        yield Complaint(
            f"PyTorch's operators run the model, which compiled passes cover: this machine lacks {facts.passes.fault}",
            "install paceline's requirements anew, or report it with the name of the processor",
            hint=True,
        )
    for ours, form in faster(facts, same_dtype=True):
        yield Complaint(
            f"passes of its shape take {_times(form)} by PyTorch's operators, {_times(ours)} compiled",
            f"set {eligibility.SWITCH}=off in the environment",
            hint=True,
        )


def dtype(facts: SetupFacts) -> Iterator[Complaint]:
    """Another dtype that was measured to be faster."""
    for ours, form in list(faster(facts, same_dtype=False))[:1]:
        yield Complaint(
            f"passes of its shape take {_times(form)} in {form.dtype}, {_times(ours)} in {ours.dtype}",
            f"use --dtype {form.dtype}",
            hint=True,
        )


def faster(facts: SetupFacts, *, same_dtype: bool) -> Iterator[tuple[FormFacts, FormFacts]]:
    """The form of the target, and each that is clearly faster for one row and for several, which are judged apart."""
    passes = facts.passes
    if passes is None or passes.crowded or not passes.forms:
        return
    ours, *others = passes.forms
    for form in others:
        clearly = all(form.seconds[rows] < CLEARLY * seconds for rows, seconds in ours.seconds.items())
        if clearly and (form.dtype == ours.dtype) is same_dtype:
            yield ours, form


def _times(form: FormFacts) -> str:
    return " and ".join(
        f"{1e3 * seconds:.3g} ms for {rows} row{'s' if rows > 1 else ''}" for rows, seconds in form.seconds.items()
    )


def threads(facts: SetupFacts) -> Iterator[Complaint]:
    """More threads than CPUs, by affinity or quota; or than cores, which is seldom good."""
    machine = facts.machine
    if facts.target.device != "cpu":
        return
    allowed = machine.cpus if machine.quota is None else min(machine.cpus, machine.quota)
    if machine.threads > allowed + 0.01:
        limit = "the affinity mask allows" if allowed == machine.cpus else "the control group's quota allows"
        yield Complaint(
            f"{machine.threads} threads, but {limit} {allowed:g} CPU{'s' if allowed > 1 else ''}",
            f"use --threads {max(1, min(int(allowed), machine.cores))}",
        )
    elif machine.threads > machine.cores:
        yield Complaint(
            f"{machine.threads} threads on {machine.cores} physical cores",
            f"try --threads {machine.cores}; `paceline tune` does",
            hint=True,
        )


def busy(facts: SetupFacts) -> Iterator[Complaint]:
    """Other processes on the cores that our threads need: every barrier waits for the slowest thread."""
    machine = facts.machine
    free = machine.cpus - machine.load
    if facts.target.device == "cpu" and machine.load > SPARE and machine.threads > free + SPARE:
        if machine.threads == 1:
            yield Complaint(
                f"other processes keep {machine.load:.1f} of {machine.cpus} CPUs busy", "stop them", hint=True
            )
            return
        yield Complaint(
            f"other processes keep {machine.load:.1f} of {machine.cpus} CPUs busy, so {machine.threads} threads wait "
            "for each other",
            f"stop them, or use --threads {max(1, int(free))}",
            hint=True,
        )


def scaling(facts: SetupFacts) -> Iterator[Complaint]:
    """Complain where fewer threads are faster."""
    machine, seconds = facts.machine, facts.machine.pass_seconds
    best = min(seconds, key=lambda number: seconds[number], default=machine.threads)
    if best < machine.threads and machine.threads in seconds and seconds[machine.threads] > SLOWER * seconds[best]:
        now, then = 1e3 * seconds[machine.threads], 1e3 * seconds[best]
        yield Complaint(
            f"a pass takes {now:.3g} ms with {machine.threads} threads, {then:.3g} ms with {best}",
            f"use --threads {best}, or find what keeps a core busy",
            hint=True,
        )


def memory(facts: SetupFacts) -> Iterator[Complaint]:
    """Parts of the process in swap, or next to nothing left."""
    machine = facts.machine
    if machine.swapped > SWAPPED * facts.target.weight_bytes and machine.swapped > 1 << 20:
        yield Complaint(
            f"{_size(machine.swapped)} of this process are in swap", "free memory, or use a smaller model or dtype"
        )
    if machine.memory_total and machine.memory_available < LOW * machine.memory_total:
        yield Complaint(
            f"{_size(machine.memory_available)} of {_size(machine.memory_total)} memory are left",
            "free memory, or use a smaller model, dtype or --max-model-len",
        )


def longest_text(facts: SetupFacts) -> Iterator[Complaint]:
    """A text of full length with its drafts, for which there is not enough memory; weights are there already."""
    use, left = facts.memory, facts.machine.memory_available
    if use is not None and left and facts.target.device == "cpu" and use.caches + use.speculation > left:
        yield Complaint(
            f"the longest text takes {_size(use.caches)} of memory and its drafts {_size(use.speculation)} more, "
            f"{_size(left)} are left",
            "lower --max-model-len, or find settings that fit with `paceline tune --memory SIZE`",
            hint=True,
        )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**29 else f"{number / 2**20:.0f} MiB"


SAMPLE: Final = "The 3 quick foxes (aged 12,345.67 days) can't jump:\n\n    def jump(self):  # größer\n\treturn None\n"
TALK: Final = ({"role": "user", "content": "Hello."},)
FAMILY: Final = "use a draft model of the target's family"


def end_tokens(facts: SetupFacts) -> Iterator[Complaint]:
    """Complain where the model declares no end token."""
    if not facts.target.eos_ids:
        yield Complaint(
            "no end token is known, so texts end at --max-tokens only", "add eos_token_id to generation_config.json"
        )


def sampling_defaults(facts: SetupFacts) -> Iterator[Complaint]:
    """A checkpoint that samples unless told otherwise."""
    temperature = facts.target.sampling.get("temperature")
    if facts.target.sampling.get("top_k") == 1 or temperature is None or temperature == 0:
        return
    yield Complaint(
        f"generation_config.json samples by default (temperature {temperature:g}), where fewer drafted tokens are "
        "accepted than at 0",
        "pass --temperature 0 if that is what you want",
        hint=True,
    )


def setup(facts: SetupFacts) -> Iterator[Complaint]:
    """A configuration that cannot be built, or a drafter that fails, for whatever reason."""
    unreadable = [draft for draft in facts.drafts if draft.tokenizer is None]
    for draft in unreadable:
        yield Complaint(
            f"draft model {draft.name} cannot be opened: {draft.error}", "give the folder or hub id of a checkpoint"
        )
    if facts.error and not unreadable:
        yield Complaint(facts.error, "correct --speculative-config")
    for probe in facts.probes:
        if probe.dropped:
            yield Complaint(
                f"drafter {probe.drafter} failed: {probe.dropped}", "report it with --log-level debug, or leave it out"
            )


def tokenizer(facts: SetupFacts) -> Iterator[Complaint]:
    """Another vocabulary, or other rules of splitting text."""
    mine = facts.target.tokenizer
    for draft, theirs in _readable(facts):
        why = same_tokenizer(mine, theirs)
        if why is not None:
            yield Complaint(f"{_short(draft)} has another vocabulary: {why}", FAMILY)
        elif (a := mine.encode(SAMPLE, False)) != (b := theirs.encode(SAMPLE, False)):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            yield Complaint(f"{_short(draft)} splits text differently: a sample differs from token {at} on", FAMILY)


def chat_template(facts: SetupFacts) -> Iterator[Complaint]:
    """Messages that the draft was trained to see in another form."""
    mine = facts.target.tokenizer
    if not mine.has_chat_template:
        return
    for draft, theirs in _readable(facts):
        if not theirs.has_chat_template:
            yield Complaint(
                f"{_short(draft)} has no chat template, the target has one",
                "use a chat version as the draft model",
                hint=True,
            )
            continue
        try:
            texts = [tokenizer.apply_chat_template(TALK) for tokenizer in (mine, theirs)]
        except PacelineError as error:
            yield Complaint(f"a chat template rejects a plain message: {error}", "correct the template", hint=True)
            continue
        if texts[0] != texts[1]:
            ids = [tokenizer.encode(text, False) for tokenizer, text in zip((mine, theirs), texts, strict=True)]
            marks = [
                [i for i in row if i in tokenizer.special_ids]
                for tokenizer, row in zip((mine, theirs), ids, strict=True)
            ]
            kind = "other wording" if marks[0] == marks[1] else "other special tokens"
            yield Complaint(
                f"{_short(draft)} writes chat messages in another form ({kind})",
                "use a draft model that was trained on the target's form",
                hint=marks[0] == marks[1],
            )


def _readable(facts: SetupFacts) -> Iterator[tuple[DraftFacts, Tokenizer]]:
    return ((draft, draft.tokenizer) for draft in facts.drafts if draft.tokenizer is not None)


def _short(draft: DraftFacts) -> str:
    return f"draft model {Path(draft.name).name!r}"


ENOUGH: Final = 12
"""Fewer drafted tokens than this prove nothing."""

NEAR_ZERO: Final = 0.1
TABLE: Final = "table"
"""Kind of drafters that copy text: they find nothing in most texts, and that is no fault."""

CAUSES: Final = {
    "head": "check its feature layers, its norm and that it was trained for this very target",
    "model": "check that its weights are whole and of the target's family",
}


def feature_layers(facts: SetupFacts) -> Iterator[Complaint]:
    """Taps that the target does not have."""
    last = facts.target.num_layers
    for probe in facts.probes:
        wrong = [layer for layer in probe.taps if not -1 <= layer <= last]
        if wrong:
            yield Complaint(
                f"{probe.drafter} reads layers {wrong}, the target has -1..{last}",
                "use a head that was trained for this target",
            )


def draft_speed(facts: SetupFacts) -> Iterator[Complaint]:
    """A drafter that takes longer for a token than the target itself, or whose drafts cannot pay."""
    for probe in facts.probes:
        target = probe.target_seconds.get(1)
        if not probe.draft_seconds or not target:
            continue
        times = f"{1e3 * probe.draft_seconds:.3g} ms for a token, the target {1e3 * target:.3g} ms"
        needed = break_even(probe)
        if probe.draft_seconds >= target:
            yield Complaint(
                f"{probe.drafter} takes {times}: drafts {_when(needed)}",
                "nothing: auto leaves it out" if facts.automatic else "use a smaller draft model, or none",
                hint=facts.automatic,
            )
        elif (rate := _rate(probe.drafted_tokens)) is not None and (needed is None or rate < needed):
            yield Complaint(
                f"{probe.drafter} takes {times}: drafts {_when(needed)}, here it is {rate:.0%}",
                "leave it to controller auto, which drafts less, or use another drafter",
                hint=True,
            )


def break_even(probe: ProbeFacts) -> float | None:
    """The least acceptance per token at which some number of drafted tokens pays; None where none does.

    With acceptance a, k drafted tokens give 1 + a + ... + a^k tokens for a pass over k + 1 rows and k drafted tokens.
    Passes between the measured numbers of rows are interpolated.
    """
    seconds = probe.target_seconds
    single, rows = seconds[1], max(seconds)
    slope = (seconds[rows] - single) / (rows - 1) if rows > 1 else 0.0
    lengths = []
    for k in range(1, max(2, rows)):
        cost = (single + max(0.0, slope) * k + k * probe.draft_seconds) / single
        if cost < k + 1:
            lengths.append(_solve(lambda a, k=k: sum(a**i for i in range(k + 1)), cost))  # type: ignore[misc]
    return min(lengths, default=None)


def _solve(rising: Callable[[float], float], value: float) -> float:
    """Where a rising function on 0..1 reaches a value, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def acceptance(facts: SetupFacts) -> Iterator[Complaint]:
    """Drafted tokens that are hardly ever accepted, or no more often than by chance; and what that looks like."""
    for probe in facts.probes:
        rate = _rate(probe.drafted_tokens)
        if probe.kind == TABLE or probe.dropped:
            continue
        if rate is None:
            if not probe.drafted_tokens:
                yield Complaint(f"{probe.drafter} proposed nothing in the probe", "check its options", hint=True)
            continue
        chance = chance_of(probe.drafted_tokens)
        spread = 3 * math.sqrt(chance * (1 - chance) / len(probe.drafted_tokens))
        if rate < NEAR_ZERO or (rate < chance + spread and rate < 0.5):
            hits, number = sum(token.hit for token in probe.drafted_tokens), len(probe.drafted_tokens)
            cause = CAUSES.get(probe.kind, "check that it fits this target")
            yield Complaint(
                f"{probe.drafter}: {hits} of {number} drafted tokens accepted ({rate:.0%}, by chance {chance:.0%}); "
                f"{_looks(probe)}",
                cause,
            )


def chance_of(drafted_tokens: Sequence[ProbedToken]) -> float:
    """How often a drafted token would be right at another position of the probe: agreement by chance."""
    number = len(drafted_tokens)
    if number < 2:
        return 0.0
    drafted, wanted = (
        Counter(token.token for token in drafted_tokens),
        Counter(token.target for token in drafted_tokens),
    )
    agree = sum(count * wanted[token] for token, count in drafted.items()) - sum(
        token.token == token.target for token in drafted_tokens
    )
    return agree / (number * (number - 1))


def _looks(probe: ProbeFacts) -> str:
    """By position, and whether the drafter knows that it is wrong."""
    first = [token for token in probe.drafted_tokens if token.position == 1]
    later = [token for token in probe.drafted_tokens if token.position > 1]
    parts = [f"first tokens {_rate_words(first)}" + (f", later ones {_rate_words(later)}" if later else "")]
    sure = fmean(token.confidence for token in probe.drafted_tokens)
    rate = _rate(probe.drafted_tokens) or 0.0
    if sure > rate + 0.3:
        parts.append(f"its mean confidence is {sure:.0%}, as if trained on another model")
    elif sure < NEAR_ZERO:
        parts.append(f"its mean confidence is {sure:.1%}, as if untrained or damaged")
    else:
        parts.append(f"its mean confidence is {sure:.0%}")
    return "; ".join(parts)


def _rate(drafted_tokens: Sequence[ProbedToken]) -> float | None:
    """Share accepted; None for too few."""
    return fmean(token.hit for token in drafted_tokens) if len(drafted_tokens) >= ENOUGH else None


def _rate_words(drafted_tokens: Sequence[ProbedToken]) -> str:
    return f"{fmean(token.hit for token in drafted_tokens):.0%}" if drafted_tokens else "none"


def _when(needed: float | None) -> str:
    return "cannot pay at all" if needed is None else f"pay from an acceptance of {needed:.0%} on"


Stage = Literal["machine", "passes", "probes"]


@dataclass(frozen=True, slots=True)
class SetupCheck:
    """Looks at the facts of a setup and yields what is wrong with it.

    Attributes:
        name: a few words.
        ask: what is wrong, by the facts; nothing where all is well or the facts are missing.
        stage: when the facts are there: at once, or once passes were timed, or drafters were probed.
    """

    name: str
    ask: Callable[[SetupFacts], Iterable[Complaint]]
    stage: Stage


CHECKS: Sequence[SetupCheck] = (
    SetupCheck("versions", versions, "machine"),
    SetupCheck("GPU", gpu, "machine"),
    SetupCheck("threads", threads, "machine"),
    SetupCheck("busy cores", busy, "machine"),
    SetupCheck("scaling", scaling, "machine"),
    SetupCheck("memory", memory, "machine"),
    SetupCheck("end tokens", end_tokens, "machine"),
    SetupCheck("sampling defaults", sampling_defaults, "machine"),
    SetupCheck("tokenizer", tokenizer, "machine"),
    SetupCheck("chat template", chat_template, "machine"),
    SetupCheck("passes", passes, "passes"),
    SetupCheck("dtype", dtype, "passes"),
    SetupCheck("setup", setup, "probes"),
    SetupCheck("longest text", longest_text, "probes"),
    SetupCheck("feature layers", feature_layers, "probes"),
    SetupCheck("draft speed", draft_speed, "probes"),
    SetupCheck("acceptance", acceptance, "probes"),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Lists which checks were made, and what they found.

    Attributes:
        findings: (name of the check, complaint) in the order of CHECKS.
        asked: names of the checks that were made.
    """

    findings: Sequence[tuple[str, Complaint]]
    asked: Sequence[str]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found but hints."""
        return all(complaint.hint for _, complaint in self.findings)


def diagnose(facts: SetupFacts, stages: Sequence[Stage] = ("machine", "passes", "probes")) -> Diagnosis:
    """Run the checks of some stages, whose facts are there."""
    checks = [check for check in CHECKS if check.stage in stages]
    findings = [(check.name, complaint) for check in checks for complaint in check.ask(facts)]
    return Diagnosis(findings, [check.name for check in checks])
