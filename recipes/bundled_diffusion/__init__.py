"""The bundled diffusion models, and published training of such models. See README.md."""
