"""Quantised checkpoints as their own tools write them: what is read, beside what these tools make of it, speed, memory.

usage: quantized_files.py [--tools PYTHON] [--model NAME] [--formats NAMES] [--only weights,logits,speed,memory]
                          [--texts FILE] [--count 32] [--windows 4] [--repeats 5] [--threads 2] [--files FOLDER]

PYTHON is the interpreter of an environment of its own with transformers, llmcompressor and compressed-tensors, and for
GPTQ and AWQ gptqmodel (`pip install llmcompressor gptqmodel`, which compiles against libpcre2-dev), none of which
Paceline needs. NAME is smollm2 or qwen05 of `real_models.py`, which makes their floats of files of 4 bits, which
flatters. Groups are of 64 inputs in SmolLM2, whose width is no multiple of 128, and of 128 in Qwen. Of the formats
`ct-` are those of compressed-tensors; `gptq`, `gptq-act-order`, `awq`, `ct-gptq` and `ct-awq` calibrate on the first
`--count` lines of JSON of FILE, whose texts are joined, or on the bundled prompts. Files that were made stay in
`--files` and are not made again; without it they lie in a temporary folder. `--only none` makes them alone. All but
making files and `weights` does without PYTHON.

weights  every weight against what the tools decompress, both in bfloat16: none may differ. The control is the same file
         with all scales times 1.1, of which nearly all weights but zeros must differ, or the script exits with 1
logits   on windows of 256 tokens, of the default, of the control and with activations of two bytes, against
         quantization="none" in float32: root mean square of the difference over the deviation of the logits, of all
         positions together, which a single one can dominate, and of the median one; and the share of positions with
         another most likely token
speed    tokens per second of plain decoding, in turn with our own int4 or int8 of FOLDER
memory   peak of a fresh process on top of one that has libraries and kernels, over that of our own form of FOLDER, at
         the first start and the next one

Results: `results/quantized_files.json`, of Qwen `quantized_files_qwen05.json`; formats that a run leaves out keep their
figures. `family_table.py` makes the table in the docs of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, alternate, kept, ratio, save
from real_models import float_folder
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.checkpoints import Tokenizer, open_checkpoint, read_config
from paceline.models import load_runner

WINDOW, SCALE = 256, 1.1
FORMS = {
    "ct-int4": "int4", "ct-int4-zeros": "int4", "ct-gptq": "int4", "ct-awq": "int4", "gptq": "int4",
    "gptq-act-order": "int4", "awq": "int4", "ct-mxfp4": "int4", "ct-nvfp4": "int4", "ct-int8": "int8",
    "ct-fp8": "int8", "ct-fp8-block": "int8",
}  # fmt: skip
"""What is written -> our own form of as many bits."""

GROUPS = {"smollm2": 64, "qwen05": 128}
"""Models, and the inputs of a group."""

WRITE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
given = json.load(sys.stdin)
name, group = given["name"], given["group"]
if name.startswith("ct-"):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    weights = {
        "ct-int4": dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group),
        "ct-int4-zeros": dict(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group),
        "ct-int8": dict(num_bits=8, type="int", symmetric=True, strategy="channel"),
        "ct-fp8-block": dict(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[group] * 2),
    }
    weights |= {"ct-gptq": weights["ct-int4"], "ct-awq": weights["ct-int4-zeros"]}
    if name in weights:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights[name]))
        how = dict(config_groups={"group_0": scheme})
    else:
        presets = {"ct-nvfp4": "NVFP4A16", "ct-mxfp4": "MXFP4A16", "ct-fp8": "FP8_DYNAMIC"}
        how = dict(scheme=presets[name], targets="Linear")
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    recipe = [(GPTQModifier if name == "ct-gptq" else QuantizationModifier)(ignore=["lm_head"], **how)]
    recipe = [AWQModifier(), *recipe] if name == "ct-awq" else recipe
    calibration = {}
    if name in ("ct-gptq", "ct-awq"):
        rows = [dict(tokenizer(text, return_tensors="pt")) for text in given["texts"]]
        calibration = dict(dataset=torch.utils.data.DataLoader(rows, batch_size=None))
    oneshot(model=model, recipe=recipe, **calibration)
    model.save_pretrained(given["to"], save_compressed=True)
    tokenizer.save_pretrained(given["to"])
else:
    from gptqmodel import GPTQModel, QuantizeConfig
    kind = dict(quant_method="awq", format="gemm") if name == "awq" else {}
    config = QuantizeConfig(bits=4, group_size=group, desc_act=name == "gptq-act-order", device="cpu", **kind)
    model = GPTQModel.load(given["model"], config)
    model.quantize(given["texts"], batch_size=1)
    model.save(given["to"])
"""
DECOMPRESS = """
import json, sys
import torch
from safetensors.torch import save_file
given = json.load(sys.stdin)
if given["name"].startswith("ct-"):
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig
    how = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(given["file"], dtype=torch.bfloat16, quantization_config=how)
    found = {name: value for name, value in model.state_dict().items() if name.endswith("_proj.weight")}
else:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    def dense(module):
        module.scales = module.scales.float()  # as are the products with them
        if hasattr(module, "dequantize_weight"):
            return module.dequantize_weight()
        numbers = dict(qweight=module.qweight, qzeros=module.qzeros, scales=module.scales)
        return dequantize_gemm(bits=module.bits, group_size=module.group_size, **numbers)

    backend = BACKEND.TORCH_AWQ if given["name"] == "awq" else BACKEND.TORCH
    model = GPTQModel.load(given["file"], device="cpu", backend=backend, dtype=torch.float16).model
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    found = {f"{name}.weight": dense(module).T for name, module in modules.items()}
save_file({name: value.detach().bfloat16().contiguous().clone() for name, value in found.items()}, given["to"])
"""
LOAD = """
import json, sys
from time import perf_counter
import torch
from paceline.bench import BUNDLED_TARGET
from paceline.models import load_runner
from paceline.models.passes.eligibility import machine_lacks

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

for form in ("int8", "int4", "blocks"):
    machine_lacks(torch.bfloat16, form)  # libraries and kernels
warm = load_runner(BUNDLED_TARGET, quantization="int4")
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
start = perf_counter()
runner = load_runner(sys.argv[1], quantization=sys.argv[2] if len(sys.argv) > 2 else None)
runner.extend([runner.open()], [[1, 2, 3]])
print(json.dumps({"seconds": perf_counter() - start, "bytes": status("VmHWM") - before}))
"""


def by_tools(tools: Path, code: str, **request: Any) -> None:
    """Run code in the tools' environment, without a GPU, in the folder that it writes to."""
    kept_out = {"PYTHONPATH", "OMP_NUM_THREADS"}
    environment = {key: value for key, value in os.environ.items() if key not in kept_out}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    where = Path(request["to"]).parent
    subprocess.run([tools, "-c", code], input=json.dumps(request), text=True, check=True, env=environment, cwd=where)


def calibration(given: argparse.Namespace) -> list[str]:
    """Texts to calibrate with.

    Raises:
        SystemExit: a line is no object of JSON, or has no texts.
    """
    if given.texts is None:
        return [prompt.prompt for prompt in bundled_prompts()]
    found = []
    with given.texts.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, given.count), 1):
            try:
                found.append(
                    "\n".join(value for value in json.loads(line).values() if isinstance(value, str) and value)
                )
            except (AttributeError, json.JSONDecodeError) as error:
                sys.exit(
                    f"--texts: line {number} of {given.texts} must be an object of JSON, got {line[:40]!r}: {error}"
                )
    return found


def made(given: argparse.Namespace, model: Path, work: Path) -> dict[str, Path]:
    """The folder of each format, written by its tools unless it is there."""
    texts = calibration(given)
    request = {"model": str(model), "texts": texts, "group": GROUPS[given.model]}
    files = {form: (given.files or work) / form for form in given.formats.split(",")}
    for form, folder in files.items():
        if not folder.exists():
            to = work / f"{form}-new"
            by_tools(given.tools, WRITE, name=form, to=str(to), **request)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(to, folder)
    return files


def control_of(folder: Path, to: Path) -> Path:
    """The same checkpoint with larger scales; powers of two are doubled."""
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix in {".json", ".txt", ".jinja"}:
            (to / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith((".scales", ".weight_scale", ".weight_scale_inv")):
                whole = tensor.dtype is torch.uint8
                tensors[name] = tensor + 1 if whole else (tensor.float() * SCALE).to(tensor.dtype)
        save_file(tensors, to / path.name, metadata={"format": "pt"})
    return to


def ours(folder: Path, windows: Sequence[Sequence[int]], **how: Any) -> list[torch.Tensor]:
    runner: Any = load_runner(folder, dtype="float32", **how)
    return [runner.extend([runner.open()], [window], all_logits=True).logits for window in windows]


def compared(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, float]:
    whole, near = torch.cat(list(wanted)), torch.cat(list(found))[:, : wanted[0].shape[1]]
    squares = (near - whole).square().mean(1)
    return {
        "error": float(squares.mean().sqrt() / whole.std()),
        "error_median": float(squares.median().sqrt() / whole.std()),
        "other_token": float((near.argmax(-1) != whole.argmax(-1)).float().mean()),
    }


def differing(folder: Path, wanted: Mapping[str, torch.Tensor]) -> float:
    """How many weights are not those wanted, in bfloat16, as a share of those that are not 0, whatever their scale."""
    checkpoint, count = open_checkpoint(folder, read_config(folder)), 0
    for name, weight in wanted.items():
        found = torch.empty_like(weight)
        checkpoint.fill(name, found)
        count += int((found != weight).sum())
    return count / sum(int(weight.count_nonzero()) for weight in wanted.values())


def weights(tools: Path, name: str, folder: Path, work: Path) -> dict[str, float]:
    """Shares of weights that differ from the tools', of the file and of its control.

    Raises:
        SystemExit: some do, or the control is not told from them.
    """
    by_tools(tools, DECOMPRESS, name=name, file=str(folder), to=str(work / "weights.safetensors"))
    wanted = load_file(work / "weights.safetensors")
    shares = [differing(one, wanted) for one in (folder, control_of(folder, work / f"{name}-weights"))]
    if shares[0] > 0 or shares[1] < 0.9:
        sys.exit(
            f"{name}: weights are not those that the format's own tool reads, or the control is not told from them: "
            f"shares of {shares[0]:.3g} and {shares[1]:.3g} differ"
        )
    return {"differing": shares[0], "differing_control": shares[1]}


def logits(model: Path, name: str, folder: Path, count: int, work: Path) -> dict[str, dict[str, float]]:
    ids = Tokenizer.load(model).encode("\n".join(prompt.prompt for prompt in bundled_prompts()))
    windows = [ids[at : at + WINDOW] for at in range(0, count * WINDOW, WINDOW)]
    control, exact = control_of(folder, work / f"{name}-logits"), ours(folder, windows, quantization="none")
    found = {"default": compared(exact, ours(folder, windows))}
    found["control"] = compared(exact, ours(control, windows, quantization="none"))
    if load_runner(folder).info.quantization == "blocks":
        found["two_bytes"] = compared(exact, ours(folder, windows, activation_bits=16))
    return found


def speed(model: Path, name: str, folder: Path, repeats: int, threads: int) -> dict[str, Any]:
    greedy = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    prompt, settings = bundled_prompts()[0].prompt, dict[str, Any](speculative_config=None, threads=threads)
    with LLM(str(folder), **settings) as theirs, LLM(str(model), quantization=FORMS[name], **settings) as own:
        runs = {"file": lambda: theirs.generate([prompt], greedy)}
        runs[FORMS[name]] = lambda: own.generate([prompt], greedy)
        seconds = alternate(runs, repeats)
    rates = {key: greedy.max_tokens / median(times) for key, times in seconds.items()}
    return {**rates, "ratio": ratio(seconds[FORMS[name]], seconds["file"])}


def memory(model: Path, name: str, folder: Path, work: Path) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    environment = os.environ | {"PACELINE_CACHE_DIR": str(work / f"{name}-cache")}
    told: dict[str, Any] = {"file_bytes": size}
    for start in ("first", "next"):
        for what, arguments in {"file": [folder], "own": [model, FORMS[name]]}.items():
            command = [sys.executable, "-c", LOAD, *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            told[f"{what}_{start}"] = json.loads(done.stdout.splitlines()[-1])
        told[f"over_own_{start}"] = told[f"file_{start}"]["bytes"] / told[f"own_{start}"]["bytes"]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, default=None, help="interpreter with the formats' own tools")
    parser.add_argument("--model", choices=GROUPS, default="smollm2")
    parser.add_argument("--formats", default=",".join(FORMS))
    parser.add_argument("--only", default="weights,logits,speed,memory")
    parser.add_argument("--texts", type=Path, default=None, help="lines of JSON to calibrate with; default: prompts")
    parser.add_argument("--count", type=int, default=32, help="lines of --texts")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--files", type=Path, default=None, help="where made files are kept")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.tools, given.files = given.tools and given.tools.absolute(), given.files and given.files.absolute()
    if unknown := set(given.formats.split(",")) - {*FORMS}:
        parser.error(f"--formats must be of {', '.join(FORMS)}, got {min(unknown)!r}")
    model, name = float_folder(given.model), "quantized_files"
    name += "" if given.model == "smollm2" else f"_{given.model}"
    parts, result = given.only.split(","), kept(name, given.folder)
    there = given.files is not None and all((given.files / form).exists() for form in given.formats.split(","))
    if given.tools is None and ("weights" in parts or not there):
        parser.error("--tools is needed for weights, and for files that are not in --files")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        files = made(given, model, work)
        measures: dict[str, Callable[[str, Path], dict[str, Any]]] = {
            "weights": lambda form, folder: weights(given.tools, form, folder, work),
            "logits": lambda form, folder: logits(model, form, folder, given.windows, work),
            "speed": lambda form, folder: speed(model, form, folder, given.repeats, given.threads),
            "memory": lambda form, folder: memory(model, form, folder, work),
        }
        for part in (part for part in measures if part in parts):
            for form, file in files.items():
                result.setdefault(part, {})[form] = measures[part](form, file)
                print(form, part, json.dumps(result[part][form]), flush=True)
                save(name, result, given.folder, parts=[f"{form}, {part}"])


if __name__ == "__main__":
    main()
