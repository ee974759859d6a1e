"""EAGLE-3, DFlash and DSpark heads go to the `speculators` package and come back: the same draft logits there and here.

usage: speculators_check.py HEAD [HEAD ...] --python PYTHON [--model smollm2] [--tokens 24] [--folder FOLDER]

HEAD is a folder of `paceline train eagle3`, `dflash` or `dspark`; PYTHON an interpreter whose environment has
speculators 0.9. Each head is converted, loaded there, and given random states and tokens; its logits must be those of
its layers here, in float32: of EAGLE-3 of all tokens, of a block of all rows that draft, behind random tokens, and of
DSpark the confidence too. Likewise in other forms: EAGLE-3 with `norm_before_residual` and with norms of queries
and keys, DFlash whose first row drafts, DSpark of every `markov_head_type`. A head that is made there with random
weights and saved by the package is loaded here and compared in the same way. In the control the exported file has
another fc, and must not agree. Results: `results/speculators.json`, by method; exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from decoding import add_model, model_of
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.models.heads import MARKOV_HEADS, HeadConfig, read_head, tensors_of, write_head
from paceline.models.runners import BlockHead, FeatureHead
from paceline.training import convert
from paceline.tree import TokenTree

EQUAL = 1e-3
"""Standard deviations by which equal logits may differ."""

THERE = """
import json, sys
import torch, transformers
from importlib import import_module
from importlib.metadata import version
from safetensors.torch import load_file, save_file
given = json.loads(sys.argv[1])
kind = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[given["method"]]
package = import_module("speculators.models." + given["method"])
config = getattr(package, kind + "SpeculatorConfig").from_pretrained(given["head"])
config.transformer_layer_config._attn_implementation = "eager"
config.speculators_config.verifier.name_or_path = given["verifier"]
model = getattr(package, kind + "DraftModel").from_pretrained(given["head"], config=config).float().eval()
if given.get("made"):
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if name not in ("lm_head.weight", "embed_tokens.weight") and "verifier" not in name:
            with torch.no_grad():
                noise = torch.randn_like(one)
                one.copy_(1 + 0.1 * noise if one.ndim == 1 else noise / one.shape[-1] ** 0.5)
    model.save_pretrained(given["made"])
inputs, found = load_file(given["inputs"]), {}
states, tokens = inputs["states"][None], inputs["tokens"][None]
zeros = torch.zeros_like(tokens)
with torch.no_grad():
    if kind == "Eagle3":
        model.lm_head.register_forward_hook(lambda module, _, made: found.setdefault("logits", made[0]))
        model(hidden_states=states, input_ids=tokens, document_ids=zeros, ttt_steps=1)
    else:
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


def here(llm: LLM, head: Path, tokens: torch.Tensor, states: torch.Tensor, anchor: int) -> dict[str, torch.Tensor]:
    """(n, v) logits of the head's layers, and of DSpark (n,) what the confidence is the sigmoid of."""
    config, weights = read_head(head, llm.runner.info)
    if config.method == "eagle3":
        made = FeatureHead.load(head, llm.runner, ["eagle3"])
        tree = TokenTree.chain([0] * (len(tokens) - 1))
        result = made.step(
            [made.open()], [tree], [0], tokens=tokens.tolist(), states=made.joined(states), picked=range(len(tokens))
        )
        return {"logits": result.logits.float()}
    block = BlockHead(config, weights, llm.runner, name=str(head))
    cache = block.open()
    block.inject([cache], [anchor], states[:anchor])
    rows = block.run([cache], tokens[anchor : anchor + 1].tolist(), block.depths)
    memory, logits, confidence = block.heads.begin(rows.states[:, 0]), [], []
    for k in range(block.depths):
        step = block.heads.step(tokens[anchor + k : anchor + k + 1], rows.states[:, k], memory)
        memory = step.memory
        logits.append(rows.logits[:, k] if step.bias is None else rows.logits[:, k] + step.bias)
        if step.confidence is not None:
            confidence.append(step.confidence.logit())
    return {"logits": torch.cat(logits).float()} | ({"confidence": torch.cat(confidence)} if confidence else {})


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest one of what both hold, in standard deviations."""
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return max(float((a[name] - b[name]).abs().max() / b[name].std()) for name in a)


def other_forms(config: HeadConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, HeadConfig, Any]]:
    """Heads like this one in other forms: a name, config, and weights, random where the form has more of them."""
    if config.method == "eagle3":
        qk_norms = {f"layers.0.self_attn.{name}_norm.weight": 1 + torch.rand(config.head_dim) for name in "qk"}
        yield "norm before residual", replace(config, norm_before_residual=True), weights
        yield "a layer of Qwen3's form", config, weights | qk_norms
    elif config.method == "dflash":
        yield "the first row drafts", replace(config, sample_from_anchor=True), weights
    else:
        for kind in MARKOV_HEADS:
            own = replace(config, markov_head_type=kind)
            yield kind, own, drawn(own, weights)
        own = replace(config, confidence_head_with_markov=False, sample_from_anchor=False)
        yield "confidence of the state alone, the first row drafts nothing", own, drawn(own, weights)


def drawn(config: HeadConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, with heads of random numbers, as many as the config says."""
    kept = {name: one for name, one in weights.items() if not name.startswith(("markov_head", "confidence_head"))}
    more = [one for one in tensors_of(config) if one.name.startswith(("markov_head", "confidence_head"))]
    return kept | {one.name: torch.randn(one.shape) / one.shape[-1] ** 0.5 for one in more}


def emptied(folder: Path) -> Path:
    """What an earlier run left there is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def measured(given: argparse.Namespace, llm: LLM, head: Path, folder: Path) -> tuple[str, dict[str, str], Any]:
    """A head's method, the versions there, and how far the two are apart."""
    info, config = llm.runner.info, read_head(head, llm.runner.info)[0]
    ours = convert(llm, head, "speculators", emptied(folder / "ours"))
    torch.manual_seed(0)
    tokens, anchor = torch.randint(info.vocab_size, (given.tokens,)), given.tokens - (config.block_size or 0) - 2
    width = load_file(ours / "model.safetensors")["fc.weight"].shape[1]
    states = torch.randn(given.tokens, width)
    save_file({"tokens": tokens, "states": states}, folder / "inputs")
    out = folder / "out"
    same = {"inputs": folder / "inputs", "out": out, "verifier": llm.folder, "method": config.method, "anchor": anchor}

    versions = there(given.python, head=ours, **same)
    mine = here(llm, head, tokens, states, anchor)
    found = {"ours there": distance(load_file(out), mine)}
    for form, changed, weights in other_forms(*read_head(head, info)):
        other, fresh = write_head(emptied(folder / "form"), changed, weights), emptied(folder / "form there")
        there(given.python, head=convert(llm, other, "speculators", fresh), **same)
        found[f"ours there, {form}"] = distance(load_file(out), here(llm, other, tokens, states, anchor))

    there(given.python, head=ours, made=emptied(folder / "theirs"), **same)
    found["theirs here"] = distance(here(llm, folder / "theirs", tokens, states, anchor), load_file(out))

    tensors = load_file(ours / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].roll(1, 0)}, ours / "model.safetensors")
    there(given.python, head=ours, **same)
    found["control"] = distance(load_file(out), mine)
    return config.method, versions, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+", metavar="HEAD")
    add_model(parser)
    parser.add_argument("--python", required=True)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    llm = model_of(given.model).open(dtype="float32")
    found, versions = {}, {}
    for head in given.heads:
        with tempfile.TemporaryDirectory() as place:
            method, versions, found[method] = measured(given, llm, head, Path(place))
    result = {"versions": versions, "tokens": given.tokens, "largest difference in standard deviations": found}
    print(json.dumps(result, indent=2))
    save("speculators", result, given.folder)
    equal = all(one < EQUAL for some in found.values() for name, one in some.items() if name != "control")
    sys.exit(0 if equal and all(some["control"] > 100 * EQUAL for some in found.values()) else 1)


if __name__ == "__main__":
    main()
