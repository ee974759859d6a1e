"""What processes of `forked` have when they begin: most of what a command or a server imports, and the compiled
kernels; not huggingface_hub, which reads the environment as it is imported.
"""

from __future__ import annotations

from importlib import import_module

from paceline.models.cpu.forward import compiled

for name in ("cli.chat", "cli.generate", "cli.serve", "llm", "serving.app", "assembly.build", "drafters.suffix.nodes"):
    import_module(f"paceline.{name}")
compiled()
