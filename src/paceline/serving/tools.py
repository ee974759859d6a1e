"""Function calls under one name: their formats, and what reads them."""

from paceline.serving.message_parts import Delta
from paceline.serving.tool_formats import FORMATS, format_of
from paceline.serving.tool_reading import Reader

__all__ = ["FORMATS", "Delta", "Reader", "format_of"]
