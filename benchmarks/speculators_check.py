"""EAGLE-3, P-EAGLE, DFlash and DSpark heads go to the `speculators` package and come back: the same draft logits there
and here.

usage: speculators_check.py HEAD [HEAD ...] --python PYTHON [--model smollm2] [--tokens 24] [--folder FOLDER]

HEAD is a folder of `paceline train eagle3`, `p_eagle`, `dflash` or `dspark`; PYTHON an interpreter whose environment
has speculators 0.9. A head is converted, loaded there, and given random states and tokens; its logits must be those of
the head's layers here, in float32; likewise in other forms: with `norm_before_residual`, norms of queries and keys,
norms before fc; DFlash whose first row drafts; DSpark of every `markov_head_type`. Of P-EAGLE they are those of
the package's pass over all tokens and the masks behind each, which are compared with one draft from each text here; of
a block those of all rows that draft, behind random tokens, and of DSpark the confidence too. A head that is made there
with random weights and saved by the package is loaded here and compared in the same way. In the controls the exported
file has another fc, or for P-EAGLE another `mask_hidden`, and must not agree. Results: `results/speculators.json`,
beside what it holds of the other methods; exits with 1 where something differs.
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
from paceline.models.heads import MARKOV_HEADS, HeadConfig, read_head, tensors_of, write_head
from paceline.models.runners import BlockHead, FeatureHead
from paceline.training import convert
from paceline.tree import TokenTree

EQUAL = 1e-3
"""Standard deviations by which equal logits may differ."""

DEPTHS = 4
"""Tokens that P-EAGLE predicts behind each text."""

MADE = """
if given.get("made"):
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if name not in ("lm_head.weight", "embed_tokens.weight") and "verifier" not in name:
            with torch.no_grad():
                noise = torch.randn_like(one)
                one.copy_(1 + 0.1 * noise if one.ndim == 1 else noise / one.shape[-1] ** 0.5)
    model.save_pretrained(given["made"])
"""
"""A model with noise as its weights, which is written where that is asked for."""

VERSIONS = """
print(json.dumps({"speculators": version("speculators"), "transformers": version("transformers"),
                  "torch": torch.__version__}))
"""
"""What ran."""

THERE = (
    """
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
"""
    + MADE
    + """
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
"""
    + VERSIONS
)

THERE_BLOCK = (
    """
import json, sys
import torch, transformers
from importlib import import_module
from importlib.metadata import version
from safetensors.torch import load_file, save_file
given = json.loads(sys.argv[1])
kind = {"dflash": "DFlash", "dspark": "DSpark"}[given["method"]]
package = import_module("speculators.models." + given["method"])
config = getattr(package, kind + "SpeculatorConfig").from_pretrained(given["head"])
config.transformer_layer_config._attn_implementation = "eager"
config.speculators_config.verifier.name_or_path = given["verifier"]
model = getattr(package, kind + "DraftModel").from_pretrained(given["head"], config=config).float().eval()
"""
    + MADE
    + """
inputs, found = load_file(given["inputs"]), {}
states, tokens = inputs["states"][None], inputs["tokens"][None]
zeros = torch.zeros_like(tokens)
with torch.no_grad():
    anchor, size = int(given["anchor"]), config.block_size
    wanted = zeros.clone()
    wanted[0, anchor] = 1
    hidden, logits, _, _, at = model._backbone_forward(
        states, tokens, wanted, torch.zeros(1, tokens.shape[1], model.hidden_size), zeros, max_anchors=1
    )
    found["logits"] = logits[0]
    if kind == "DSpark":
        block = tokens[0, at].view(1, size)
        before = block if config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], 1)
        e = model.markov_head.prev_embeddings(before)
        h = hidden.view(1, size, -1)
        found["logits"] += model.markov_head.block_bias(prev_token_ids=before, hidden_states=h, prev_emb=e)[0]
        read = torch.cat([h, e], -1) if config.confidence_head_with_markov else h
        found["confidence"] = model.confidence_head(read).view(-1)
    if not config.sample_from_anchor:
        found = {name: one[1:] for name, one in found.items()}
save_file({name: one.contiguous() for name, one in found.items()}, given["out"])
"""
    + VERSIONS
)


def there(python: str, **given: Any) -> dict[str, str]:
    """Run the package on a head; its versions."""
    script = THERE_BLOCK if given["method"] in ("dflash", "dspark") else THERE
    done = subprocess.run(
        [python, "-c", script, json.dumps({key: str(value) for key, value in given.items()})],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"speculators cannot load the head: {done.stderr[-2000:]}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


Rows = dict[str, torch.Tensor]
"""Logits (n, v), and of DSpark (n,) what the confidence is the sigmoid of."""


def here(llm: LLM, head: Path, tokens: torch.Tensor, states: torch.Tensor, anchor: int) -> Rows:
    """Those of the head's layers: of every text that ends with one of the tokens (n,), of P-EAGLE the rows of
    `predicted`, of a block those that draft.
    """
    config, weights = read_head(head, llm.runner.info)
    if config.method in ("dflash", "dspark"):
        return of_block(BlockHead(config, weights, llm.runner, name=str(head)), tokens, states, anchor)
    made = FeatureHead.load(head, llm.runner, ["eagle3", "p_eagle"])
    if made.mask is not None:
        return {"logits": predicted(made, tokens, states)}
    tree = TokenTree.chain([0] * (len(tokens) - 1))
    result = made.step(
        [made.open()], [tree], [0], tokens=tokens.tolist(), states=made.joined(states), picked=range(len(tokens))
    )
    return {"logits": result.logits.float()}


def of_block(head: BlockHead, tokens: torch.Tensor, states: torch.Tensor, anchor: int) -> Rows:
    """The rows of a block behind the tokens up to its anchor, with tokens as they are before each place."""
    cache = head.open()
    head.inject([cache], [anchor], states[:anchor])
    rows = head.run([cache], tokens[anchor : anchor + 1].tolist(), head.depths)
    memory, logits, confidence = head.heads.begin(rows.states[:, 0]), [], []
    for k in range(head.depths):
        step = head.heads.step(tokens[anchor + k : anchor + k + 1], rows.states[:, k], memory)
        memory = step.memory
        logits.append(rows.logits[:, k] if step.bias is None else rows.logits[:, k] + step.bias)
        if step.confidence is not None:
            confidence.append(step.confidence.logit())
    return {"logits": torch.cat(logits).float()} | ({"confidence": torch.cat(confidence)} if confidence else {})


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


def distance(a: Rows, b: Rows) -> float:
    """Largest one of what both hold, in standard deviations."""
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return max(float((a[name] - b[name]).abs().max() / b[name].std()) for name in a)


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
    states, anchor = torch.randn(given.tokens, width), given.tokens - (config.block_size or 0) - 2
    save_file({"tokens": tokens, "states": states}, folder / "inputs")
    same = {
        "inputs": folder / "inputs", "out": folder / "out", "verifier": llm.folder, "method": config.method,
        "depths": DEPTHS, "anchor": anchor,
    }  # fmt: skip

    versions = there(given.python, head=ours, **same)
    mine = here(llm, head, tokens, states, anchor)
    found = {"ours there": distance(load_file(folder / "out"), mine)}
    for form, changed, own in forms(config, weights):
        other, fresh = write_head(folder / form, changed, own), emptied(folder / f"{form} there")
        there(given.python, head=convert(llm, other, "speculators", fresh), **same)
        found[f"ours there, {form}"] = distance(load_file(folder / "out"), here(llm, other, tokens, states, anchor))

    there(given.python, head=ours, made=folder / "theirs", **same)
    found["theirs here"] = distance(here(llm, folder / "theirs", tokens, states, anchor), load_file(folder / "out"))

    tensors = load_file(ours / "model.safetensors")
    controls = {"control": tensors | {"fc.weight": tensors["fc.weight"].roll(1, 0)}}
    if config.method == "p_eagle":
        controls["control, mask_hidden"] = tensors | {"mask_hidden": tensors["mask_hidden"].roll(1, -1)}
    for control, changed_tensors in controls.items():
        save_file(changed_tensors, ours / "model.safetensors", metadata={"format": "pt"})
        there(given.python, head=ours, **same)
        found[control] = distance(load_file(folder / "out"), mine)
    return config.method, {
        "versions": versions, "tokens": given.tokens, "layers": config.num_layers,
        "largest difference in standard deviations": found,
    }  # fmt: skip


Tensors = dict[str, torch.Tensor]


def forms(config: HeadConfig, weights: Tensors) -> list[tuple[str, HeadConfig, Tensors]]:
    """Heads of other forms: name, config, and tensors, random ones beside the head's own where the form has more."""
    if config.method == "dflash":
        return [("the first row drafts", replace(config, sample_from_anchor=True), weights)]
    if config.method == "dspark":
        kinds = [(kind, replace(config, markov_head_type=kind)) for kind in MARKOV_HEADS]
        apart = replace(config, confidence_head_with_markov=False, sample_from_anchor=False)
        kinds.append(("confidence of the state alone, the first row drafts nothing", apart))
        return [(name, own, drawn(own, weights)) for name, own in kinds]
    at = [f"layers.{layer}.self_attn.{name}_norm.weight" for layer in range(config.num_layers) for name in "qk"]
    width, taps = config.hidden_size, len(config.taps)
    each = {f"fc_norm.{tap}.weight": 1 + torch.rand(width) for tap in range(taps)}
    return [
        ("norm before residual", replace(config, norm_before_residual=True), weights),
        ("a layer of Qwen3's form", config, weights | {name: 1 + torch.rand(config.head_dim) for name in at}),
        ("norm before fc", config, weights | {"input_norm.weight": 1 + torch.rand(taps * width)}),
        ("norms of each state before fc", config, weights | each),
    ]


def drawn(config: HeadConfig, weights: Tensors) -> Tensors:
    """The weights, with heads of random numbers, as many as the config says."""
    kept = {name: one for name, one in weights.items() if not name.startswith(("markov_head", "confidence_head"))}
    more = [one for one in tensors_of(config) if one.name.startswith(("markov_head", "confidence_head"))]
    return kept | {one.name: torch.randn(one.shape) / one.shape[-1] ** 0.5 for one in more}


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
