"""Drafters that look ahead with a diffusion language model."""
