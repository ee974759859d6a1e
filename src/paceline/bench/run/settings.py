"""What is compared: plain decoding, and speculative settings by name.

Without settings of their own, users get plain decoding, "auto", and every registered method that runs on this model
without more options than a draft model; the others are listed with the reason. A method with an option `continuations`
gets the recorded ones.

The acceptance dial's drafter is a measuring device, which nothing else knows: its users are within `dial_registered`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline import registry
from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.utils import json_object, json_value
from paceline.verify import claimed_class

PLAIN = "plain"
RECORD = "continuations"
DIAL = "corrupted_oracle"
DIAL_ENTRY = registry.Entry(
    "paceline.bench.run.oracle:CorruptedOracleDrafter",
    "table",
    ("bit-equal up to near ties", "bit-equal up to near ties"),
    ("recorded continuations",),
    "A measuring device: acceptance at will, after the analysis of arXiv:2211.17192",
)

Records = Mapping[tuple[int, ...], Sequence[int]]


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """Names one way of decoding that is measured.

    Attributes:
        name: unique in a run.
        config: its speculative_config; None is plain decoding.
    """

    name: str
    config: Mapping[str, Any] | None

    @property
    def needs_record(self) -> bool:
        """Whether a drafter of it takes recorded continuations that the user did not give."""
        return any(_takes(entry, RECORD) and RECORD not in entry for entry in _methods(self.config))

    @property
    def acceptance(self) -> float | None:
        """The dial, where this setting is one."""
        dials = [entry.get("acceptance") for entry in _methods(self.config) if _takes(entry, RECORD)]
        return float(dials[0]) if dials and isinstance(dials[0], int | float) else None

    def open(self, llm: LLM, records: Records | None = None) -> LLM:
        """An engine for this setting around the same weights.

        Raises:
            PacelineError: it cannot run on this model.
        """
        return llm.with_speculative_config(self.config if records is None else _with(self.config, records))

    def to_dict(self, llm: LLM) -> dict[str, Any]:
        """Its entry in the document; `llm` is an engine of this setting."""
        greedy, sampled = claimed_class(llm)
        config = None if self.config is None else {k: v for k, v in self.config.items() if k != RECORD}
        return {
            "name": self.name,
            "config": config,
            "drafters": llm.drafter_methods,
            "claimed": {"greedy": greedy, "sampled": sampled},
            "acceptance": self.acceptance,
            "baseline": self.config is None,
        }


BASELINE = BenchSetting(PLAIN, None)


def _methods(config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The dicts of single methods in a speculative_config."""
    if config is None:
        return []
    method = config.get("method")
    if isinstance(method, list | tuple):
        return [entry if isinstance(entry, Mapping) else {"method": entry} for entry in method]
    return [config]


def _takes(config: Mapping[str, Any], option: str) -> bool:
    """Whether the drafter's constructor has this option."""
    name = config.get("method")
    if not isinstance(name, str) or name == "auto":
        return False
    return option in inspect.signature(registry.load("drafters", name)).parameters


def _with(config: Mapping[str, Any] | None, records: Records) -> Mapping[str, Any] | None:
    """The config with recorded continuations where they are wanted."""
    if config is None:
        return None
    if isinstance(config.get("method"), list | tuple):
        return {**config, "method": [_filled(entry, records) for entry in _methods(config)]}
    return _filled(config, records)


def _filled(config: Mapping[str, Any], records: Records) -> Mapping[str, Any]:
    return {**config, RECORD: records} if _takes(config, RECORD) and RECORD not in config else config


def parse_settings(texts: Sequence[str]) -> list[BenchSetting]:
    """Settings from JSON, or from bare method names; null is plain decoding and is always there.

    Raises:
        ConfigError: no JSON, an unknown key of the dialect, a setting given twice.
    """
    settings: list[BenchSetting] = []
    for text in texts:
        config = _json(text)
        SpeculativeConfig.parse(config)
        if config is None:
            continue
        setting = BenchSetting(setting_name(config), config)
        if any(other.name == setting.name for other in settings):
            raise ConfigError(f"the setting {setting.name!r} was given twice; give it once")
        settings.append(setting)
    return settings


def _json(text: str) -> dict[str, Any] | None:
    if text.isidentifier() and text not in ("null", "true", "false"):
        return {"method": text}
    if text.lstrip().startswith("["):
        return {"method": json_value("a setting", text)}
    return json_object("a setting", text, hint='{"method": "ngram"}')


def setting_name(config: Mapping[str, Any]) -> str:
    """A short name: the methods, and the other keys in brackets."""
    methods = "+".join(
        str(entry.get("method", "draft_model" if "model" in entry else "auto")) for entry in _methods(config)
    )
    rest = [f"{key}={_short(value)}" for key, value in config.items() if key not in ("method", RECORD)]
    return f"{methods}({', '.join(rest)})" if rest else methods


def _short(value: object) -> str:
    text = value.rstrip("/").rsplit("/", 1)[-1] if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


@contextmanager
def dial_registered() -> Iterator[None]:
    """Where the dial's drafter can be named in a speculative_config: within this block; also a decorator."""
    with registry.temporary("drafters", {DIAL: DIAL_ENTRY}):
        yield


OF_REQUESTS = {
    "prediction": "it follows what a request predicts, and workloads predict nothing",
    "grammar": "it follows what constrains a request, and workloads constrain nothing",
}
"""Methods that no workload can measure -> why."""


def dial_settings(acceptances: Sequence[float], tokens: int | None = None) -> list[BenchSetting]:
    """The acceptance dial at these points, with a fixed number of speculative tokens or the controller's choice."""
    fixed = {} if tokens is None else {"num_speculative_tokens": tokens}
    most = "" if tokens is None else f" x {tokens}"
    return [
        BenchSetting(f"dial {value:g}{most}", {"method": DIAL, "acceptance": value, **fixed}) for value in acceptances
    ]


def default_settings(llm: LLM, draft: str | None = None) -> tuple[list[BenchSetting], list[dict[str, str]]]:
    """ "auto" and every registered method that runs here; and the others, with the reason.

    Args:
        draft: draft model for methods that take one; None takes the one that ships with the target, if any.
    """
    draft = draft or llm.default_draft
    settings, skipped = [], []
    auto: dict[str, Any] = {"method": "auto"} | ({"model": draft} if draft and draft != llm.default_draft else {})
    for config in [auto, *({"method": name} for name in registry.table("drafters"))]:
        if _takes(config, RECORD):
            skipped.append(
                {"name": str(config["method"]), "why": "it is a measuring device, not a drafter; use --dial"}
            )
            continue
        if (why := OF_REQUESTS.get(str(config["method"]))) is not None:
            skipped.append({"name": str(config["method"]), "why": why})
            continue
        try:
            settings.append(_runnable(llm, config, draft))
        except PacelineError as error:
            skipped.append({"name": str(config["method"]), "why": str(error)})
    return settings, skipped


def _runnable(llm: LLM, config: dict[str, Any], draft: str | None) -> BenchSetting:
    """The setting, tried on the model; with the draft model where it takes one."""
    name = str(config["method"])
    if draft is not None and _takes(config, "model"):
        config = {**config, "model": draft}
    llm.with_speculative_config(config)
    return BenchSetting(name, config)
