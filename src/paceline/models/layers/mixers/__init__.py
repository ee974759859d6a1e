"""Mixers of layers that keep a state: one pass through them (`step`), and each kind."""
