"""Drafters with a second model that has the target's tokenizer."""
