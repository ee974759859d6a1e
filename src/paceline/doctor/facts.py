"""What the doctor's checks know: plain records, so that a test can state any setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.assembly import MemoryUse
    from paceline.checkpoints import Tokenizer


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong, or (a hint) that may cost speed or surprise.

    Attributes:
        what: found. do: what to do about it.
    """

    what: str
    do: str
    hint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Describes the machine as this process sees it.

    Attributes:
        threads: of PyTorch.
        cpus: logical CPUs that the affinity mask allows; `cores`: physical ones among them.
        quota: CPUs' worth of time that the control group allows; None is unlimited.
        load: CPUs' worth of work that others did on those CPUs while this process slept.
        pass_seconds: number of threads -> seconds of one pass of the target.
        memory_total, memory_available, swapped: bytes; `swapped` of this process.
        gpu: what shows that there is a GPU; None where nothing does.
        cuda: PyTorch can use one; `cuda_build`: its CUDA version, None for a CPU build.
        versions: package -> (installed, required); installed None is missing, required "" is any. `unfit`: those that
            do not fit.
    """

    threads: int = 1
    cpus: int = 1
    cores: int = 1
    quota: float | None = None
    load: float = 0.0
    pass_seconds: Mapping[int, float] = field(default_factory=dict)
    memory_total: int = 0
    memory_available: int = 0
    swapped: int = 0
    gpu: str | None = None
    cuda: bool = False
    cuda_build: str | None = None
    versions: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    unfit: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FormFacts:
    """What a few layers of the target's shape cost in one form.

    Attributes:
        passes: as of `ModelInfo`; `dtype`: of the weights, as "bfloat16" or "int4".
        seconds: number of rows -> CPU time of a pass on one thread.
    """

    passes: str
    dtype: str
    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """Says what runs the target on the CPU, and what a pass takes.

    Attributes:
        passes: as of `ModelInfo`.
        processor: its name and number of CPUs; `instructions`: that compiled passes use, as "AVX-512, AMX".
        lacks: why compiled passes do not run it; None where they do.
        fault: what this machine lacks for them, though they cover the model; None where it lacks nothing.
        seconds: number of rows -> seconds of a pass of the target itself.
        layers: that the forms have.
        forms: first the one that the target runs in, then others that could run it; empty where there are none, or no
            room for them. `crowded`: other programs took much of the processor while they ran.
    """

    passes: str
    processor: str = ""
    instructions: str = ""
    lacks: str | None = None
    fault: str | None = None
    seconds: Mapping[int, float] = field(default_factory=dict)
    layers: int = 0
    forms: Sequence[FormFacts] = ()
    crowded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Describes the target model.

    Attributes:
        device, dtype: as "cpu", "bfloat16".
        num_layers, weight_bytes: of the model.
        tokenizer: its own.
        eos_ids: end tokens; `sampling`: defaults of generation_config.json.
    """

    device: str
    dtype: str
    num_layers: int
    weight_bytes: int
    tokenizer: Tokenizer
    eos_ids: Sequence[int] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """Describes a draft model that the configuration names.

    `tokenizer` is None where it could not be read, for the reason `error`.
    """

    name: str
    tokenizer: Tokenizer | None
    error: str = ""
    automatic: bool = False


@dataclass(frozen=True, slots=True)
class ProbedToken:
    """Compares one drafted position with what the target chose there.

    Attributes:
        position: depth in the draft, from 1 on.
        token: the drafter's first choice there; `target`: the target's token.
        hit: whether one of the drafter's choices was that.
        confidence: the drafter's own, of its first choice.
    """

    position: int
    token: int
    target: int
    hit: bool
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """A short greedy generation with one drafter at a fixed number of tokens.

    Attributes:
        drafter: its name; `kind`: as in the registry.
        taps: layers of the target that it wants.
        drafted_tokens: in order.
        draft_seconds: of one drafted token; 0 where it drafted nothing.
        target_seconds: rows -> seconds of one pass of the target, with 1 and with more rows.
        dropped: why the engine dropped it; "" if it did not.
        note: how it was set up (`Drafter.note`).
    """

    drafter: str
    kind: str
    taps: Sequence[int] = ()
    drafted_tokens: Sequence[ProbedToken] = ()
    draft_seconds: float = 0.0
    target_seconds: Mapping[int, float] = field(default_factory=dict)
    dropped: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """Gathers all facts of a setup that checks look at.

    Attributes:
        passes: of the target on the CPU; None elsewhere.
        error: why the configuration cannot be built; "" if it can.
        automatic: a drafter that does not pay is left out by itself.
        memory: predicted of the longest text with drafts, where it is counted.
    """

    machine: MachineFacts
    target: TargetFacts
    memory: MemoryUse | None = None
    passes: PassFacts | None = None
    drafts: Sequence[DraftFacts] = ()
    probes: Sequence[ProbeFacts] = ()
    error: str = ""
    automatic: bool = False
