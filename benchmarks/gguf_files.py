"""GGUF files beside llama.cpp: the same tokens for texts, nearly the same distributions for tokens, what loading takes.

usage: gguf_files.py --data FOLDER [--vocabularies FOLDER] [--texts 1000] [--windows 4] [--only PARTS]

values   SmolLM2's own Q4_1 file, Q8_0 and F16 files of the values in it, and files that llama.cpp makes of the F16 one
         (Q4_0, IQ4_NL; Q4_K_M, of whose matrices only down projections can be Q4_K or Q6_K, the others being Q5_0 and
         Q8_0): our default, int4, int8 and "none" (bfloat16) on windows of 512 tokens, every token given, against
         llama.cpp on the same file: share of positions with the same most likely token, and divergence in nats of our
         distribution from its. llama.cpp's own rounding shows in its files against its F16. A file whose MLPs are
         scaled by 1.1 is the control: it must diverge far more.
tokens   ids equal to llama.cpp's on texts from --data (lines of .jsonl and .txt files), for the model and for every
         file in --vocabularies; the control is the model's file with another rule of cutting text
loading  seconds of a fresh process, and its peak memory over the size of the weights that it holds then

llama.cpp runs in its own environment: `python -m lab peers install llama.cpp`. Results: `results/gguf_files.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from common import RESULTS, kept, save
from real_models import gguf_file

from lab.peers import peers_home
from paceline.checkpoints import Tokenizer
from paceline.models import load_runner

FORMS = ("int4", "int8", "none")
DEFAULT = "default"
WINDOW, SCALE = 512, 1.1
KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16")}
MADE = {"Q4_0": 2, "Q4_K_M": 15, "IQ4_NL": 25}
"""Numbers of llama.cpp's own file types."""

LOGITS = """
import json, sys
import numpy as np
from llama_cpp import Llama
given = json.load(sys.stdin)
size = len(given["windows"][0])
model = Llama(given["file"], n_ctx=2 * size, n_batch=given["rows"], logits_all=True, n_threads=1, verbose=False)
for number, window in enumerate(given["windows"]):
    model.reset()
    model.eval(window)
    np.save(f"{given['to']}/{number}.npy", model.scores[: len(window)])
"""
QUANTIZE = """
import ctypes, json, sys
import llama_cpp
given = json.load(sys.stdin)
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = given["type"], 1
sys.exit(llama_cpp.llama_model_quantize(given["file"].encode(), given["to"].encode(), ctypes.byref(params)))
"""
TOKENS = """
import json, sys
from llama_cpp import Llama
given = json.load(sys.stdin)
model = Llama(given["file"], vocab_only=True, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=True) for text in given["texts"]]))
"""
LOAD = """
import json, sys
from pathlib import Path
from time import process_time
import torch
from paceline.bench import BUNDLED_TARGET
from paceline.models import load_runner
from paceline.checkpoints import quantized_sizes, read_config, spec_from_config, weight_bytes

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

file, form = Path(sys.argv[1]), sys.argv[2]
load_runner(BUNDLED_TARGET, quantization=form)  # libraries and kernels
spec, before = spec_from_config(read_config(file)), status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
start = process_time()
runner = load_runner(file, quantization=form)
seconds, peak = process_time() - start, status("VmHWM") - before
dense = form == "none"
sizes = weight_bytes(spec, torch.bfloat16) if dense else quantized_sizes(spec, torch.bfloat16, form)
size = sum(sizes.values()) + (sizes["embed.weight"] if dense and spec.tied else 0)  # a tied head is packed too
print(json.dumps({"seconds": seconds, "bytes": size, "peak_over_bytes": peak / size}))
"""


def llama_cpp(code: str, **request: Any) -> str:
    """What code prints in the environment of llama.cpp.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    python = peers_home() / "llama.cpp" / "bin" / "python"
    if not python.exists():
        sys.exit("llama.cpp is not installed; run `python -m lab peers install llama.cpp`")
    return subprocess.run(
        [python, "-c", code], input=json.dumps(request), capture_output=True, text=True, check=True
    ).stdout


# ------------------------------------------------------------------------------------------------ files


def rewritten(
    source: Path,
    to: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    *,
    scale: float = 1.0,
    rule: str | None = None,
) -> Path:
    """A copy of a file with its matrices in another type (None: in their own), those of MLPs scaled, with another rule
    by which text is cut.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            value = rule if rule and name == "tokenizer.ggml.pre" else field.contents()
            writer.add_key_value(name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        values = values * np.float32(scale if ".ffn_" in tensor.name else 1.0)
        own = kind or tensor.tensor_type
        if own not in KINDS.values() and own.name not in ("Q4_0", "Q4_1"):
            own = KINDS["Q8_0"]  # the package writes no others
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def texts_of(folder: Path, count: int) -> list[str]:
    """Lines drawn from the texts of a folder."""
    files = sorted(path for ending in ("*.jsonl", "*.txt") for path in folder.rglob(ending))
    lines = [line.strip() for file in files for line in file.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if 20 < len(line) < 20000]
    if len(lines) < count:
        sys.exit(f"{folder} holds {len(lines)} lines of .jsonl and .txt files, {count} are asked for")
    return random.Random(0).sample(lines, count)


# ------------------------------------------------------------------------------------------------ values


def theirs(file: Path, windows: Sequence[Sequence[int]], work: Path) -> list[torch.Tensor]:
    """Log-probabilities (tokens, vocabulary) of every window from llama.cpp.

    Its products of several rows, made for AMX, end the process where a virtual machine lacks that; then token by token.
    """
    request = {"file": str(file), "windows": windows, "to": str(work)}
    try:
        llama_cpp(LOGITS, rows=WINDOW, **request)
    except subprocess.CalledProcessError as error:
        if error.returncode >= 0:
            raise
        llama_cpp(LOGITS, rows=1, **request)
    return [torch.from_numpy(np.load(work / f"{i}.npy")).log_softmax(-1) for i in range(len(windows))]


def ours(file: Path, windows: Sequence[Sequence[int]], form: str) -> list[torch.Tensor]:
    runner = load_runner(file, quantization=None if form == DEFAULT else form)
    found = [runner.extend([runner.open()], [list(one)], all_logits=True).logits for one in windows]
    return [logits.float().log_softmax(-1) for logits in found]


def compared(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, float]:
    """Share of positions with the same most likely token; mean divergence in nats of `found` from `wanted`."""
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).float() for a, b in zip(wanted, found, strict=True)])
    apart = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(wanted, found, strict=True)])
    return {"same_token": float(same.mean()), "divergence": float(apart.mean())}


def values(files: Mapping[str, Path], control: Path, windows: Sequence[Sequence[int]], work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"positions": sum(map(len, windows))}
    reference = {name: theirs(file, windows, work) for name, file in files.items()}
    for name, file in files.items():
        found[name] = {form: compared(reference[name], ours(file, windows, form)) for form in (DEFAULT, *FORMS)}
        found[name]["llama.cpp, F16"] = compared(reference["F16"], reference[name])
        print(name, found[name])
    own = next(iter(files))
    found["control"] = compared(reference[own], ours(control, windows, "none"))
    if found["control"]["divergence"] < 5 * found[own]["none"]["divergence"]:
        sys.exit(f"weights scaled by {SCALE} are not caught: {found}")
    return found


# ------------------------------------------------------------------------------------------------ tokens


def tokens(files: Mapping[str, Path], control: Path, texts: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many texts have llama.cpp's ids; `control` is the first file with another rule."""
    found = {}
    for name, file in files.items():
        wanted = json.loads(llama_cpp(TOKENS, file=str(file), texts=texts))
        found[name] = equal_ids(file, texts, wanted)
        if not found.get("control"):
            found["control"] = equal_ids(control, texts, wanted)
        print(name, found[name])
    if found["control"]["equal"] == len(texts):
        sys.exit("another rule of cutting is not caught; take other texts")
    return found


def equal_ids(file: Path, texts: Sequence[str], wanted: Sequence[list[int]]) -> dict[str, int]:
    tokenizer = Tokenizer.load(file)
    same = [tokenizer.encode(text, False) == ids for text, ids in zip(texts, wanted, strict=True)]
    return {"texts": len(texts), "equal": sum(same)}


# ------------------------------------------------------------------------------------------------ loading


def loading(files: Mapping[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, file in files.items():
        for form in FORMS:
            command = [sys.executable, "-c", LOAD, file, form]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.setdefault(name, {})[form] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of texts")
    parser.add_argument("--vocabularies", type=Path, help="folder of further GGUF files, which may hold no weights")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--only", default="values,tokens,loading")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    parts, result = given.only.split(","), kept("gguf_files", given.folder)
    texts = texts_of(given.data, given.texts)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        files = {"Q4_1": gguf_file("smollm2")}
        for kind, number in KINDS.items() if {"values", "loading"} & set(parts) else ():
            files[kind] = rewritten(files["Q4_1"], work / f"{kind}.gguf", number)
        if "values" in parts:
            ids = Tokenizer.load(files["Q4_1"]).encode("\n".join(texts))
            windows = [ids[at : at + WINDOW] for at in range(0, given.windows * WINDOW, WINDOW)]
            made = {kind: work / f"{kind}.gguf" for kind in MADE}
            for kind, path in made.items():
                llama_cpp(QUANTIZE, file=str(files["F16"]), to=str(path), type=MADE[kind])
            control = rewritten(files["Q4_1"], work / "control.gguf", scale=SCALE)
            result["values"] = values(files | made, control, windows, work)
        if "tokens" in parts:
            more = sorted(given.vocabularies.glob("*.gguf")) if given.vocabularies else []
            control = rewritten(files["Q4_1"], work / "rule.gguf", rule="gpt-2")
            result["tokens"] = tokens({"SmolLM2": files["Q4_1"]} | {path.stem: path for path in more}, control, texts)
        if "loading" in parts:
            result["loading"] = loading(files)
    save("gguf_files", result, given.folder, parts=parts)


if __name__ == "__main__":
    main()
