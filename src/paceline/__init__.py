"""Paceline: faster decoding of language models with the same output."""

__version__ = "0.1.0"
