"""Typed reading of a checkpoint's `config.json`, family defaults included.

In: the JSON object and the defaults of its family. Out: single values of the right type, or one clear line about a wrong one.
Not here: what the keys mean (models.families, models.rope_keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checking import MAX_NUMBER, shortened
from paceline.errors import CheckpointError

MAX_SIZE = 2**31 - 1
MOST = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts"), 10_000)
"""Sizes that are counted out in Python, so that a broken file must not make them endless."""


class ConfigKeys:
    """`config.json` over a family's defaults. An explicit null stays None; only a missing key takes the default.

    Attributes:
        family: `model_type`, for messages.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], family: str) -> None:
        self._values = {**defaults, **config}
        self._defaults = defaults
        self.family = family

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def known(self, name: str) -> bool:
        """Whether the family reads this key, which is so if it has a default."""
        return name in self._defaults

    def given(self, name: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(name) is not None

    def size(self, name: str) -> int:
        """A positive integer of a size that models have."""
        value = self._values.get(name)
        if value is None:
            raise CheckpointError(f"config.json lacks {name!r}, which a {self.family} model needs; download the checkpoint again")
        most = MOST.get(name, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, f"an integer in 1..{most}")
        return value

    def optional_size(self, name: str) -> int | None:
        """A positive integer, or None for null or nothing."""
        return self.size(name) if self.given(name) else None

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.wrong(name, "a finite number")
        return float(value)

    def not_negative(self, name: str) -> float:
        """A number of 0 or more."""
        if (value := self.number(name)) < 0:
            raise self.wrong(name, "0 or more")
        return value

    def positive(self, name: str) -> float:
        """A number above 0."""
        if (value := self.number(name)) <= 0:
            raise self.wrong(name, "above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.given(name) else None

    def optional_positive(self, name: str) -> float | None:
        """A number above 0, or None for null or nothing."""
        return self.positive(name) if self.given(name) else None

    def flag(self, name: str) -> bool:
        """True or False; null and nothing are False."""
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; {} for null or nothing."""
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return dict(value)

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, of at least `length` entries; None for null or nothing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if length is not None and len(value) < length:
            raise self.wrong(name, f"a list of {length} entries, one per layer")
        return value

    def wrong(self, name: str, rule: str) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"config.json: {name!r} must be {rule}, got {shortened(self._values.get(name))}; repair or download it again"
        )
