"""Checkpoints as files of llama.cpp, written by its own converter and quantiser, and whether it computes what we do.

Texts of random weights mean nothing, so the files have a vocabulary of numbers, and prompts are token ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from block_quality import llama_logprobs, logprobs
from own_computers import output
from real_models import LlamaCpp
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.models import load_runner

KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Our kinds of weights, and llama.cpp's nearest ones."""

CONVERTED = ("f32", "f16", "bf16")
"""What the converter writes; the quantiser makes the others of the last."""

HEAD = "q8_0"
"""Of the table and the head where matrices have 4 bits, as in our int4."""

WINDOW, APART = 64, 0.005
"""Tokens that both engines read, and how far apart their log-probabilities may be in float32, as a share of their
spread.
"""

CONVERT = """
import sys
source = sys.argv.pop(1)
sys.path[:0] = [source, f"{source}/gguf-py"]
import convert_hf_to_gguf as script

def numbers(model):
    size, writer = model.hparams["vocab_size"], model.gguf_writer
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([6 if i < 256 else 1 for i in range(size)])  # byte, normal

class_of = script.get_model_class

def with_numbers(*words, **options):
    found = class_of(*words, **options)
    found.set_vocab, found.no_mtp = numbers, found.supports_mtp_export
    return found

script.get_model_class = with_numbers
script.main()
"""
"""The converter as it is, but for the vocabulary and without heads that draft, which these checkpoints do not have."""


class NotConvertedError(Exception):
    """llama.cpp has no place for a model; the message is its own."""


def converted(llama: LlamaCpp, checkpoint: Path, kind: str, threads: int) -> Path:
    """A checkpoint's file, kept in its folder `llama.cpp` and made if it is not there yet.

    Args:
        llama: whose converter, quantiser and loader are used.
        checkpoint: folder of a model as transformers saves it.
        kind: a key of `KINDS`, of the matrices; where it is "int4", table and head have 8 bits.
        threads: of the quantiser.

    Raises:
        NotConvertedError: the converter or the loader refuses.
        SystemExit: the quantiser fails.
    """
    theirs = KINDS[kind]
    path = checkpoint / "llama.cpp" / f"{theirs}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    try:
        if theirs in CONVERTED:
            with as_published(checkpoint) as folder:
                words = [str(llama.source), str(folder), "--outfile", str(part), "--outtype", theirs]
                _attempt([sys.executable, "-c", CONVERT, *words])
            _attempt([str(llama.bench), "-m", str(part), "-p", "1", "-n", "0", "-r", "1", "-v"])
        else:
            source = converted(llama, checkpoint, "bfloat16", threads)
            head = ["--token-embedding-type", HEAD, "--output-tensor-type", HEAD]
            output([str(llama.programs / "llama-quantize"), *head, str(source), str(part), theirs, str(threads)])
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


@contextmanager
def as_published(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint; of mixtures that hold all experts of a layer as one, as a module of transformers does, a copy for
    this once that names tensors as published files do, which the converter expects.
    """
    files = list(checkpoint.glob("*.safetensors"))
    if not any(name.endswith(".experts.gate_up_proj") for file in files for name in _names(file)):
        yield checkpoint
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lacking, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    if unknown or set(lacking) - {"lm_head.weight"}:
        sys.exit(f"{checkpoint.name}: its tensors are not those of transformers, first {[*unknown, *lacking][0]}")
    model.tie_weights()
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"
        written = json.loads(path.read_text())
        path.write_text(json.dumps(written | _published_keys(written)))
        yield Path(folder)


def _published_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of published files that the converter reads and transformers does not write."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if kind in ("deepseek_v3", "glm4_moe_lite"):
        return {"scoring_func": "sigmoid", "first_k_dense_replace": 1}
    if kind == "minimax_m2":
        return {"scoring_func": "sigmoid", "rotary_dim": config["head_dim"]}
    if kind == "hunyuan_v1_moe":
        by_layer = {"moe_topk": config["moe_topk"], "moe_intermediate_size": config["intermediate_size"]}
        return {key: [value] * layers for key, value in {**by_layer, "num_shared_expert": 1}.items()}
    return {}


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as held:
        return list(held.keys())


def _attempt(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise NotConvertedError(next((line for line in lines if "error loading" in line), lines[-1])[:300])


def agreement(llama: LlamaCpp, checkpoint: Path, threads: int) -> dict[str, Any]:
    """Whether llama.cpp computes what we do on a checkpoint in float32, where rounding does not hide a difference.

    As a control, its rows moved by one position must be too far away.

    Returns:
        `apart`: the deviation of the difference of both engines' log-probabilities, as a share of that of ours, at the
        nearest quarter of positions: in mixtures near ties between experts move some. Or, as `llama.cpp`, why it does
        not read the model.

    Raises:
        SystemExit: they are further apart than `APART`, or the control is not.
    """
    try:
        file = converted(llama, checkpoint, "float32", threads)
    except NotConvertedError as error:
        return {"llama.cpp": str(error)}
    ids = [(37 * i) % 5000 + 100 for i in range(WINDOW)]
    (ours,) = logprobs(load_runner(checkpoint, dtype="float32"), [ids])
    (found,) = llama_logprobs(llama, file, [ids], ours.shape[1], threads)
    file.unlink()
    near, far = (float((ours - other).std(-1).quantile(0.25) / ours.std()) for other in (found, found.roll(1, 0)))
    if not near < APART < far:
        sys.exit(
            f"{checkpoint.name}: log-probabilities of llama.cpp are {near:.4f} of the spread away from ours, those of "
            f"another position {far:.4f}, with {APART} between them allowed; nothing is timed"
        )
    return {"apart": near}
