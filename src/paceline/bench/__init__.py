"""Measuring methods against plain decoding on a model of the user; nothing here prints."""

from importlib import import_module
from typing import Any

import lazy_loader

_published, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A published name, or for one more release one that has moved (`former`)."""
    try:
        return _published(name)
    except AttributeError:
        former = import_module("paceline.bench.former")
        if name not in former.__all__:
            raise
        return getattr(former, name)
