"""A controller that lacks what its constructor should have set."""

from __future__ import annotations

from typing import Any

from paceline.controllers.policies import FixedController


class Policy(FixedController):
    """Without a name."""

    def __getattribute__(self, key: str) -> Any:
        if key == "name":
            raise AttributeError(key)
        return super().__getattribute__(key)
