"""LoRA adapters go to the `peft` package and come back: the same logits there and here.

usage: peft_check.py --python PYTHON [--steps 20] [--folder FOLDER]

PYTHON is an interpreter whose environment has peft, transformers and torch. `paceline.training` makes an adapter of
the bundled model, which peft loads; one that peft makes, of other modules and with random weights, is loaded here. In
float32 the logits of one text must be the same. In the control peft's model runs without its adapter, and must not
agree. Results: `results/peft.json`; exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from safetensors.torch import load_file

from paceline import LLM
from paceline.training import Fitting, train, training_config

EQUAL = 1e-3
"""Standard deviations by which equal logits may differ."""

TEXTS = [f"Question {i}: what is {i} and {i + 1}? It is {2 * i + 1}, which is odd." for i in range(40)]

THERE = """
import json, sys
import torch, transformers
from importlib.metadata import version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
given = json.loads(sys.argv[1])
tokens = torch.tensor([given["tokens"]])
load = lambda: transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32).eval()
with torch.no_grad():
    model = PeftModel.from_pretrained(load(), given["ours"]).eval()
    found = {"ours": model(tokens).logits[0]}
    with model.disable_adapter():
        found["base"] = model(tokens).logits[0]
    torch.manual_seed(1)
    wanted = LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(load(), wanted).eval()
    found["theirs"] = model(tokens).logits[0]
    model.save_pretrained(given["theirs"])
save_file({name: one.contiguous() for name, one in found.items()}, given["out"])
print(json.dumps({name: version(name) for name in ("peft", "transformers", "torch")}))
"""


def there(python: str, **given: Any) -> dict[str, str]:
    """Run the package; its versions."""
    done = subprocess.run([python, "-c", THERE, json.dumps(given)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"peft cannot load the adapter: {done.stderr[-2000:]}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """(n, v) float32."""
    runner: Any = llm.runner
    cache, last = runner.open(), runner.info.num_layers
    states = runner.extend([cache], [tokens], taps=(last,)).taps[last]
    runner.release(cache)
    found: torch.Tensor = runner.head(states, norm=False).float()
    return found


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plain = LLM(dtype="float32", speculative_config=None)
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    fitting = Fitting(steps=given.steps, row_tokens=64, warmup_steps=1, learning_rate=5e-3)
    train(plain, training_config("lora", data=(data,), texts=True, fitting=fitting), folder / "ours")
    tokens = list(plain.tokenizer.encode(TEXTS[0]))
    ours, theirs, out = (str(folder / name) for name in ("ours", "theirs", "out"))
    versions = there(given.python, model=str(plain.folder), tokens=tokens, ours=ours, theirs=theirs, out=out)
    found = load_file(out)
    here = {name: logits(LLM(dtype="float32", speculative_config=None, lora=folder / name), tokens)
            for name in ("ours", "theirs")}  # fmt: skip
    distances = {name: float((here[name] - found[name]).abs().max() / here[name].std()) for name in here}
    distances["control"] = float((here["ours"] - found["base"]).abs().max() / here["ours"].std())
    return {"versions": versions, "tokens": len(tokens), "largest difference in standard deviations": distances}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = measured(given, Path(place))
    print(json.dumps(result, indent=2))
    save("peft", result, given.folder)
    found = dict(result["largest difference in standard deviations"])
    control = found.pop("control")
    sys.exit(0 if max(found.values()) < EQUAL and control > 100 * EQUAL else 1)


if __name__ == "__main__":
    main()
