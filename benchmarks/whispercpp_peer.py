"""whisper.cpp with a Whisper model, in a Python of its own that has `pywhispercpp`: what `speech.py` asks it for.

usage: PYTHON whispercpp_peer.py FILE THREADS

Reads lines of JSON from standard input, each with `samples` (a .npy file of float32, 16 kHz, mono, one window) and
`language`; answers each with `encode` and `decode` (seconds) and `tokens`, times among them. The encoder runs twice:
alone, to be timed, and within the whole, from which its seconds and those of the spectrogram are taken away. A package
that pip compiled looks for its libraries in the folder where it was compiled; they lie beside it, and are loaded first.
"""

from __future__ import annotations

import ctypes
import json
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "whisper")


def loaded() -> Any:
    """The package."""
    for name in LIBRARIES:
        for path in Path(sysconfig.get_path("platlib")).glob(f"lib{name}.so.?"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import _pywhispercpp  # type: ignore[import-not-found]  # lives in an environment of its own

    return _pywhispercpp


def main() -> None:
    file, threads, whisper = sys.argv[1], int(sys.argv[2]), loaded()
    context = whisper.whisper_init_from_file_with_params(file, whisper.whisper_context_default_params())
    settings = whisper.whisper_full_default_params(whisper.whisper_sampling_strategy.WHISPER_SAMPLING_GREEDY)
    settings.n_threads, settings.temperature_inc, settings.no_context = threads, 0.0, True
    settings.print_progress, settings.greedy = False, {"best_of": 1}
    about = {"version": version("pywhispercpp"), "instructions": whisper.whisper_print_system_info()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        samples = np.load(asked["samples"])
        settings.language = asked["language"]
        start = perf_counter()
        whisper.whisper_pcm_to_mel(context, samples, len(samples), threads)
        heard = perf_counter()
        whisper.whisper_encode(context, 0, threads)
        encoded = perf_counter()
        whisper.whisper_full(context, settings, samples, len(samples))
        whole = perf_counter() - encoded
        segments = range(whisper.whisper_full_n_segments(context))
        tokens = [
            whisper.whisper_full_get_token_id(context, segment, place)
            for segment in segments
            for place in range(whisper.whisper_full_n_tokens(context, segment))
        ]
        seconds = {"encode": encoded - heard, "decode": whole - (encoded - start)}
        print(json.dumps(seconds | {"tokens": tokens}), flush=True)
    whisper.whisper_free(context)


if __name__ == "__main__":
    main()
