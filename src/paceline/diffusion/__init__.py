"""Parallel decoding of masked diffusion language models: canvas, rules, caches, verification and the one loop over them."""
