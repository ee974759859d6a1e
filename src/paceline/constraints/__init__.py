"""Sampling rules, evaluated at every node of a tree along its own path."""
