"""The bundled target, its draft, and what goes with them: from public text to model folders. See README.md."""
