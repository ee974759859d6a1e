"""The doctor's checks as one list, and the facts that they judge.

In: Facts, measured or injected. Out: findings, one line each with what to do. Not here: gathering facts
(`bench.doctor`).

Adding a check: write a function from Facts to complaints in the file of its subject, and add a line to CHECKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.bench.doctor import checks_draft, checks_machine, checks_model
from paceline.bench.doctor.facts import Complaint, Facts


@dataclass(frozen=True, slots=True)
class Check:
    """One question to a setup.

    Attributes:
        name: a few words.
        ask: what is wrong, by the facts; nothing where all is well or the facts are missing.
    """

    name: str
    ask: Callable[[Facts], Iterable[Complaint]]


CHECKS: Sequence[Check] = (
    Check("versions", checks_machine.versions),
    Check("GPU", checks_machine.gpu),
    Check("dtype", checks_machine.dtype),
    Check("threads", checks_machine.threads),
    Check("busy cores", checks_machine.busy),
    Check("scaling", checks_machine.scaling),
    Check("memory", checks_machine.memory),
    Check("end tokens", checks_model.end_tokens),
    Check("sampling defaults", checks_model.sampling_defaults),
    Check("setup", checks_model.setup),
    Check("tokenizer", checks_model.tokenizer),
    Check("special tokens", checks_model.special_tokens),
    Check("chat template", checks_model.chat_template),
    Check("feature layers", checks_draft.feature_layers),
    Check("draft speed", checks_draft.draft_speed),
    Check("acceptance", checks_draft.acceptance),
    Check("acceptance by position", checks_draft.by_position),
    Check("acceptance by token", checks_draft.by_token_class),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answers.

    Attributes:
        findings: (name of the check, complaint) in the order of CHECKS.
        asked: names of all checks.
    """

    findings: Sequence[tuple[str, Complaint]]
    asked: Sequence[str]

    @property
    def healthy(self) -> bool:
        """No finding but hints."""
        return all(complaint.hint for _, complaint in self.findings)


def diagnose(facts: Facts) -> Diagnosis:
    """Ask everything."""
    findings = [(check.name, complaint) for check in CHECKS for complaint in check.ask(facts)]
    return Diagnosis(findings, [check.name for check in CHECKS])
