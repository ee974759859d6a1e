"""The mask token of a parallel draft model: an id that stands for a token which is not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import CheckpointError

MASK_TOKEN: Final = "pard_token"
"""PARD's own key of config.json."""

MASK_KEYS: Final = ("mask_token_id", MASK_TOKEN, "ptd_token_id")
"""Keys of config.json that name the mask token, in the order in which vLLM looks for them."""


def mask_token(config: Mapping[str, Any], name: str) -> int | None:
    """The mask token that a config.json names, None where it names none.

    Args:
        name: of the checkpoint, for the message.
    Raises:
        CheckpointError: what it names is no id.
    """
    for key in MASK_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"{name}: {key} in config.json must be a token id, got {value!r}; repair it")
        return value
    return None
