"""Function calls under one name, for scripts that import them from here: their formats, and what reads them."""

from paceline.serving.chat import FORMATS, Reader, format_of

__all__ = ["FORMATS", "Reader", "format_of"]
