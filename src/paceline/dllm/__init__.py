"""Diffusion language models behind the front door: requests, results and refusals shaped as those of every other model."""
