"""EAGLE-3 and P-EAGLE heads go to the `speculators` package and come back: the same draft logits there and here.

usage: speculators_check.py HEAD [HEAD ...] --python PYTHON [--model smollm2] [--tokens 24] [--folder FOLDER]

HEAD is a folder of `paceline train eagle3` or `p_eagle`; PYTHON an interpreter whose environment has speculators 0.9. A
head is converted, loaded there, and given random states and tokens; its logits must be those of the head's layers here,
in float32; likewise with `norm_before_residual`, with norms of queries and keys, and with norms before fc. Of P-EAGLE
they are those of the package's pass over all tokens and the masks behind each, which are compared with one draft from
each text here. A head that is made there with random weights and saved by the package is loaded here and compared in
the same way. In the controls the exported file has another fc, or for P-EAGLE another `mask_hidden`, and must not
agree. Results: `results/speculators.json`, beside what it holds of the other method; exits with 1 where something
differs.
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
from paceline.drafters import Context
from paceline.drafters.heads.feature_drafts import FeatureState
from paceline.drafters.heads.parallel_drafts import ParallelDrafts
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models.heads import HeadConfig, read_head, write_head
from paceline.models.runners import FeatureHead
from paceline.training import convert
from paceline.tree import TokenTree

EQUAL = 1e-3
"""Standard deviations by which equal logits may differ."""

DEPTHS = 4
"""Tokens that P-EAGLE predicts behind each text."""

THERE = """
import json, sys
import torch, transformers
from importlib.metadata import version
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.peagle import core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
given = json.loads(sys.argv[1])
parallel = given["method"] == "p_eagle"
config_class = PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig
config = config_class.from_pretrained(given["head"])
config.transformer_layer_config._attn_implementation = "eager"
config.speculators_config.verifier.name_or_path = given["verifier"]
torch.manual_seed(2)
model_class = PEagleDraftModel if parallel else Eagle3DraftModel
model = model_class.from_pretrained(given["head"], config=config).float().eval()
if given.get("made"):
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if name not in ("lm_head.weight", "embed_tokens.weight") and "verifier" not in name:
            with torch.no_grad():
                noise = torch.randn_like(one)
                one.copy_(1 + 0.1 * noise if one.ndim == 1 else noise / one.shape[-1] ** 0.5)
    model.save_pretrained(given["made"])
inputs, found = load_file(given["inputs"]), []
more = {}
if parallel:
    n, depths = len(inputs["tokens"]), int(given["depths"])
    rows = [(anchor, depth) for depth in range(depths) for anchor in range(n - depth)]
    core.generate_cod_sample_indices = lambda **_: tuple(torch.tensor(one) for one in zip(*rows))
    more = {"verifier_last_hidden_states": torch.zeros(1, n, model.hidden_size), "num_depths": depths,
            "loss_config": resolve_loss_config("kl_div", "eager")}
else:
    more = {"ttt_steps": 1}
model.lm_head.register_forward_hook(lambda module, _, made: found.append(made))
with torch.no_grad():
    model(hidden_states=inputs["states"][None], input_ids=inputs["tokens"][None],
          document_ids=torch.zeros_like(inputs["tokens"])[None], **more)
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
    """Logits of the head's layers: (n, v) of every text that ends with one of the tokens (n,), or of P-EAGLE the rows
    of `predicted`.
    """
    made = FeatureHead.load(head, llm.runner, ["eagle3", "p_eagle"])
    if made.mask is not None:
        return predicted(made, tokens, states)
    tree = TokenTree.chain([0] * (len(tokens) - 1))
    result = made.step(
        [made.open()], [tree], [0], tokens=tokens.tolist(), states=made.joined(states), picked=range(len(tokens))
    )
    return result.logits.float()


def predicted(head: FeatureHead, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """(r, v) logits of drafts from each text that ends with one of the tokens: those that the text's last token
    predicts, then those of each further depth, as far as the tokens go.
    """
    drafts = ParallelDrafts(head, int(tokens.max()) + 1, 0)
    rows = []
    for end in range(1, len(tokens) + 1):
        text = [0, *tokens[:end].tolist()]
        state = FeatureState(Context("r", text, len(text)), head.open(), TappedStates(0, states[:end]))
        rows.append(drafts.predicted([state], [min(DEPTHS, len(tokens) + 1 - end)])[0].float())
    return torch.cat([torch.stack([row[depth] for row in rows if len(row) > depth]) for depth in range(DEPTHS)])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of logits, in standard deviations."""
    return float((a - b).abs().max() / b.std())


def emptied(folder: Path) -> Path:
    """What an earlier run left there is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def measured(given: argparse.Namespace, llm: LLM, head: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    """The head's method, and what was found."""
    info = llm.runner.info
    config, weights = read_head(head, info)
    ours = convert(llm, head, "speculators", emptied(folder / "ours"))
    torch.manual_seed(0)
    tokens, width = torch.randint(info.vocab_size, (given.tokens,)), len(config.taps) * config.hidden_size
    states = torch.randn(given.tokens, width)
    save_file({"tokens": tokens, "states": states}, folder / "inputs")
    same = {
        "inputs": folder / "inputs", "out": folder / "out", "verifier": llm.folder, "method": config.method,
        "depths": DEPTHS,
    }  # fmt: skip

    versions = there(given.python, head=ours, **same)
    mine = here(llm, head, tokens, states)
    found = {"ours there": distance(load_file(folder / "out")["logits"], mine)}
    for form, changed, more in forms(config):
        other, fresh = write_head(folder / form, changed, weights | more), emptied(folder / f"{form} there")
        there(given.python, head=convert(llm, other, "speculators", fresh), **same)
        found[f"ours there, {form}"] = distance(load_file(folder / "out")["logits"], here(llm, other, tokens, states))

    there(given.python, head=ours, made=folder / "theirs", **same)
    found["theirs here"] = distance(here(llm, folder / "theirs", tokens, states), load_file(folder / "out")["logits"])

    tensors = load_file(ours / "model.safetensors")
    controls = {"control": tensors | {"fc.weight": tensors["fc.weight"].roll(1, 0)}}
    if config.method == "p_eagle":
        controls["control, mask_hidden"] = tensors | {"mask_hidden": tensors["mask_hidden"].roll(1, -1)}
    for control, changed_tensors in controls.items():
        save_file(changed_tensors, ours / "model.safetensors", metadata={"format": "pt"})
        there(given.python, head=ours, **same)
        found[control] = distance(load_file(folder / "out")["logits"], mine)
    return config.method, {
        "versions": versions, "tokens": given.tokens, "layers": config.num_layers,
        "largest difference in standard deviations": found,
    }  # fmt: skip


def forms(config: HeadConfig) -> list[tuple[str, HeadConfig, dict[str, torch.Tensor]]]:
    """Heads of other forms: name, config, and tensors beside the head's own."""
    at = [f"layers.{layer}.self_attn.{name}_norm.weight" for layer in range(config.num_layers) for name in "qk"]
    width, taps = config.hidden_size, len(config.taps)
    each = {f"fc_norm.{tap}.weight": 1 + torch.rand(width) for tap in range(taps)}
    return [
        ("norm before residual", replace(config, norm_before_residual=True), {}),
        ("a layer of Qwen3's form", config, {name: 1 + torch.rand(config.head_dim) for name in at}),
        ("norm before fc", config, {"input_norm.weight": 1 + torch.rand(taps * width)}),
        ("norms of each state before fc", config, each),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+")
    add_model(parser)
    parser.add_argument("--python", required=True)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    llm = model_of(given.model).open(dtype="float32")
    file, fine = given.folder / "speculators.json", True
    for head in given.heads:
        with tempfile.TemporaryDirectory() as place:
            method, result = measured(given, llm, head, Path(place))
        print(json.dumps({method: result}, indent=2))
        known = json.loads(file.read_text()).get("heads", {}) if file.exists() else {}
        save(file.stem, {"heads": {**known, method: result}}, given.folder)
        found = result["largest difference in standard deviations"]
        controls = [value for name, value in found.items() if name.startswith("control")]
        equal = [value for name, value in found.items() if not name.startswith("control")]
        fine = fine and max(equal) < EQUAL and min(controls) > 100 * EQUAL
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
