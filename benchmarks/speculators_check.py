"""EAGLE-3 heads go to the `speculators` package and come back: the same draft logits there and here.

usage: speculators_check.py HEAD --python PYTHON [--model smollm2] [--tokens 24] [--folder FOLDER]

HEAD is a folder of `paceline train eagle3`; PYTHON an interpreter whose environment has speculators 0.9. The head is
converted, loaded there, and given random states and tokens; its logits must be those of the head's layer here, in
float32; likewise with `norm_before_residual`, and with norms of queries and keys. A head that is made there with random
weights and saved by the package is loaded here and compared in the same way. In the control the exported file has
another fc, and must not agree. Results: `results/speculators.json`; exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from decoding import add_model, model_of
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.models.heads import read_head, write_head
from paceline.models.runners import FeatureHead
from paceline.training import convert
from paceline.tree import TokenTree

EQUAL = 1e-3
"""Standard deviations by which equal logits may differ."""

THERE = """
import json, sys
import torch, transformers
from importlib.metadata import version
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
given = json.loads(sys.argv[1])
config = Eagle3SpeculatorConfig.from_pretrained(given["head"])
config.transformer_layer_config._attn_implementation = "eager"
config.speculators_config.verifier.name_or_path = given["verifier"]
model = Eagle3DraftModel.from_pretrained(given["head"], config=config).float().eval()
if given.get("made"):
    torch.manual_seed(1)
    state = {k: v for k, v in model.state_dict().items()}
    for name, one in model.named_parameters():
        if name not in ("lm_head.weight", "embed_tokens.weight") and "verifier" not in name:
            with torch.no_grad():
                noise = torch.randn_like(one)
                one.copy_(1 + 0.1 * noise if one.ndim == 1 else noise / one.shape[-1] ** 0.5)
    model.save_pretrained(given["made"])
inputs, found = load_file(given["inputs"]), []
model.lm_head.register_forward_hook(lambda module, _, made: found.append(made))
with torch.no_grad():
    model(hidden_states=inputs["states"][None], input_ids=inputs["tokens"][None],
          document_ids=torch.zeros_like(inputs["tokens"])[None], ttt_steps=1)
save_file({"logits": found[0][0].contiguous()}, given["out"])
print(json.dumps({"speculators": version("speculators"), "transformers": version("transformers"),
                  "torch": torch.__version__}))
"""


def there(python: str, **given: Any) -> dict[str, str]:
    """Run the package on a head; its versions."""
    done = subprocess.run(
        [python, "-c", THERE, json.dumps({key: str(value) for key, value in given.items()})],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"speculators cannot load the head: {done.stderr[-2000:]}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def here(llm: LLM, head: Path, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """(n, v) logits of the head's layer."""
    made = FeatureHead.load(head, llm.runner, ["eagle3"])
    tree = TokenTree.chain([0] * (len(tokens) - 1))
    result = made.step(
        [made.open()], [tree], [0], tokens=tokens.tolist(), states=made.joined(states), picked=range(len(tokens))
    )
    return result.logits.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of logits, in standard deviations."""
    return float((a - b).abs().max() / b.std())


def emptied(folder: Path) -> Path:
    """What an earlier run left there is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def measured(given: argparse.Namespace, llm: LLM, folder: Path) -> dict[str, Any]:
    info = llm.runner.info
    ours = convert(llm, given.head, "speculators", emptied(folder / "ours"))
    torch.manual_seed(0)
    tokens = torch.randint(info.vocab_size, (given.tokens,))
    width = load_file(ours / "model.safetensors")["fc.weight"].shape[1]
    states = torch.randn(given.tokens, width)
    save_file({"tokens": tokens, "states": states}, folder / "inputs")
    same = {"inputs": folder / "inputs", "out": folder / "out", "verifier": llm.folder}

    versions = there(given.python, head=ours, **same)
    mine = here(llm, given.head, tokens, states)
    found = {"ours there": distance(load_file(folder / "out")["logits"], mine)}

    config, weights = read_head(given.head, info)
    qk_norms = {f"layers.0.self_attn.{name}_norm.weight": 1 + torch.rand(config.head_dim) for name in "qk"}
    for form, changed, more in (
        ("norm before residual", replace(config, norm_before_residual=True), {}),
        ("a layer of Qwen3's form", config, qk_norms),
    ):
        other, fresh = write_head(folder / form, changed, weights | more), emptied(folder / f"{form} there")
        there(given.python, head=convert(llm, other, "speculators", fresh), **same)
        found[f"ours there, {form}"] = distance(load_file(folder / "out")["logits"], here(llm, other, tokens, states))

    there(given.python, head=ours, made=folder / "theirs", **same)
    found["theirs here"] = distance(here(llm, folder / "theirs", tokens, states), load_file(folder / "out")["logits"])

    tensors = load_file(ours / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].roll(1, 0)}, ours / "model.safetensors")
    there(given.python, head=ours, **same)
    found["control"] = distance(load_file(folder / "out")["logits"], mine)
    return {"versions": versions, "tokens": given.tokens, "largest difference in standard deviations": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    add_model(parser)
    parser.add_argument("--python", required=True)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    llm = model_of(given.model).open(dtype="float32")
    with tempfile.TemporaryDirectory() as place:
        result = measured(given, llm, Path(place))
    print(json.dumps(result, indent=2))
    save("speculators", result, given.folder)
    found = dict(result["largest difference in standard deviations"])
    control = found.pop("control")
    sys.exit(0 if max(found.values()) < EQUAL and control > 100 * EQUAL else 1)


if __name__ == "__main__":
    main()
