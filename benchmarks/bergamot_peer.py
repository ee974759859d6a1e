"""Bergamot's own engine, in a Python of its own: what `bergamot.py` asks it for.

usage: PYTHON bergamot_peer.py MODEL VOCABULARY SHORTLIST PRECISION

PRECISION is Marian's gemm-precision. Reads sentences from standard input, a JSON text a line, and answers each with its
translation, the likeliest token at every step. The package asks for lists of models online as it is imported; only the
compiled module inside it is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

LONGEST = 128
"""Tokens of a sentence that is not cut."""


def native() -> Any:
    """The engine's compiled module."""
    (path,) = (Path(sysconfig.get_path("platlib")) / "bergamot").glob("_bergamot*")
    spec = importlib.util.spec_from_file_location("_bergamot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    model, vocabulary, shortlist, precision = sys.argv[1:]
    settings = {
        "models": [model], "vocabs": [vocabulary, vocabulary], "shortlist": [shortlist, False], "beam-size": 1,
        "normalize": 1.0, "word-penalty": 0, "max-length-break": LONGEST, "mini-batch-words": 8 * LONGEST,
        "workspace": 128, "max-length-factor": 2.5, "skip-cost": True, "cpu-threads": 1, "quiet": True,
        "quiet-translation": True, "gemm-precision": precision, "alignment": "soft", "ssplit-mode": "sentence",
    }  # fmt: skip
    bergamot = native()
    service = bergamot.Service(bergamot.ServiceConfig(numWorkers=1, logLevel="critical"))
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(settings, file)  # which is YAML, too
        file.flush()
        loaded = service.modelFromConfigPath(file.name)
    options = bergamot.ResponseOptions(alignment=False, qualityScores=False, HTML=False)
    print(json.dumps({"version": version("bergamot")}), flush=True)
    for line in sys.stdin:
        response = service.translate(loaded, bergamot.VectorString([json.loads(line)]), options)[0]
        print(json.dumps(response.target.text), flush=True)


if __name__ == "__main__":
    main()
