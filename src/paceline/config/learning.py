"""How a served drafter learns from the requests that it drafts for: the key `learn` of a `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from paceline.config.declared import check_options, documented, option
from paceline.utils import need, reject_unknown

PAUSES: Final = ("auto", "always", "never")


@documented
@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Says how often a drafter learns, from how much, and what keeps it from getting worse (Online Speculative
    Decoding).

    Raises:
        ConfigError: a value outside its range.
    """

    interval: int = option(16, doc="Ended requests of a tenant after which its drafter is trained.", low=1)
    steps: int = option(32, doc="Gradient steps of a round, on one request each: new ones first.", low=1, high=10_000)
    held_out: int = option(
        8, doc="The newest requests, which a round does not learn: the candidate is replayed on them.", low=1
    )
    learning_rate: float | None = option(
        None, doc="Of AdamW; None is a fifth of the method's peak in training, 0 learns nothing.",
        low=0.0, high=1.0, rule="be in 0..1",
    )  # fmt: skip
    top_logits: int = option(
        32, doc="Of the model's likeliest tokens that are kept where a draft was rejected.", low=1, high=1024
    )
    record_tokens: int = option(512, doc="Most tokens of a request that are kept, half of them of the prompt.", low=16)
    buffer_bytes: int = option(
        64 << 20, doc="Memory for what requests have taught, of all tenants together; the oldest go first.", low=1
    )
    max_tenants: int = option(
        8, doc="Tenants whose drafters learn; the one that asked least lately makes way for another.", low=1
    )
    rollback: bool = option(
        True,
        doc="Compare a new version with the one before it, and take it back where fewer of its drafts are right.",
    )
    pause: str = option(
        "auto", choices=PAUSES,
        doc='"always": the trainer waits while requests run; "never"; "auto": where there are not more cores than '
        "threads that decode.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def parse(cls, value: object) -> LearnConfig | None:
        """From True, a dict of these settings, False or None (nothing is learned).

        Raises:
            ConfigError: anything else, an unknown key, or a value outside its range.
        """
        if value is None or value is False or isinstance(value, LearnConfig):
            return value or None
        need(value is True or isinstance(value, Mapping), "learn", "be True, False or a dict of its settings", value)
        settings = dict(value) if isinstance(value, Mapping) else {}
        reject_unknown("learn", settings, [field.name for field in fields(cls)])
        return cls(**settings)
