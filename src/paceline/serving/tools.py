"""Function calls under one name: their formats, and what reads them."""

from paceline.serving.tool_formats import FORMATS, format_of
from paceline.serving.tool_reading import Delta, Reader

__all__ = ["FORMATS", "Delta", "Reader", "format_of"]
