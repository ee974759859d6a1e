"""The old place of `Tokenizer`, for one more release."""

from paceline.checkpoints import Tokenizer

__all__ = ["Tokenizer"]
