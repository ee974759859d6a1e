"""CTranslate2 with a Whisper model, in a Python of its own: what `speech.py` asks it for.

usage: PYTHON ctranslate2_peer.py FOLDER float32|int8 THREADS

Reads lines of JSON from standard input, each with `features` (a .npy file (80, 3000) float32) and `prompt` (token ids);
answers each with `encode` and `decode` (seconds) and `tokens`. CTranslate2 keeps to Whisper's rules of times itself.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

import ctranslate2  # type: ignore[import-not-found]  # lives in an environment of its own
import numpy as np


def main() -> None:
    folder, kind, threads = sys.argv[1:]
    model = ctranslate2.models.Whisper(folder, compute_type=kind, intra_threads=int(threads), inter_threads=1)
    print(json.dumps({"version": ctranslate2.__version__}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        features = ctranslate2.StorageView.from_array(np.load(asked["features"])[None])
        start = perf_counter()
        states = model.encode(features, to_cpu=True)
        encoded = perf_counter()
        found = model.generate(states, [asked["prompt"]], beam_size=1, max_length=448, return_scores=False)[0]
        seconds = {"encode": encoded - start, "decode": perf_counter() - encoded}
        print(json.dumps(seconds | {"tokens": found.sequences_ids[0]}), flush=True)


if __name__ == "__main__":
    main()
