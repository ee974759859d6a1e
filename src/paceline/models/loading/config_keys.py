"""Typed reading of a checkpoint's `config.json`, family defaults included.

In: the JSON object and the defaults of its family. Out: single values of the right type, or one clear line about a
wrong one.
Not here: what the keys mean (models.loading.families, models.loading.rope_keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError
from paceline.utils import MAX_NUMBER, shortened

MAX_SIZE = 2**31 - 1
MOST = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "first_k_dense_replace"), 10_000)
"""Sizes that are counted out in Python, so that a broken file must not make them endless."""

SIZES = ("head_dim", "num_key_value_heads", "original_max_position_embeddings", "sliding_window")
FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
"""Keys with one kind of value in every family; another kind is a sign of a damaged file, also where the family does not
read it.
"""


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

    def check(self) -> None:
        """Refuse a wrong value of a key that means the same in every family.

        Raises:
            CheckpointError: the first of them.
        """
        for name in SIZES:
            self.optional_size(name)
        for name in FLAGS:
            self.flag(name)

    def size(self, name: str) -> int:
        """A positive integer of a size that models have."""
        value = self._values.get(name)
        if value is None:
            raise CheckpointError(
                f"config.json lacks {name!r}, which a {self.family} model needs; download the checkpoint again"
            )
        most = MOST.get(name, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, f"an integer in 1..{most}")
        return value

    def optional_size(self, name: str) -> int | None:
        """A positive integer, or None for null or nothing."""
        return self.size(name) if self.given(name) else None

    def count(self, name: str) -> int:
        """An integer of 0 or more."""
        value, most = self._values.get(name), MOST.get(name, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.wrong(name, f"an integer in 0..{most}")
        return value

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.wrong(name, "a finite number")
        return float(value)

    def share(self, name: str) -> float:
        """A number in 0..1."""
        if not 0 <= (value := self.number(name)) <= 1:
            raise self.wrong(name, "in 0..1")
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
        """A list, of `length` entries where that is given; None for null or nothing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if length is not None and len(value) != length:
            raise self.wrong(name, f"a list of {length} entries, one per layer")
        return value

    def integers(self, name: str, length: int | None = None) -> list[int] | None:
        """A list of integers of 0 or more, see `items`."""
        value = self.items(name, length)
        if not all(isinstance(one, int) and one >= 0 for one in value or []):
            raise self.wrong(name, "a list of integers")
        return value

    def wrong(self, name: str, rule: str) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"config.json: {name!r} must be {rule}, got {shortened(self._values.get(name))}; repair or download it "
            f"again"
        )
