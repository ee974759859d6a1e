"""Trained heads at equal data on published prompts: what each gives alone, in chains and trees, beside plain decoding
and `auto`.

usage: heads.py METHOD [METHOD ...] --data FOLDER --work FOLDER [--sets spec-bench,gsm8k,humaneval,mt-redundant]
                [--minutes 20 | --steps N] [--prompts 12] [--tokens 128] [--temperature 0] [--batch 1] [--repeats 1]
                [--threads 2] [--settings all] [--name heads] [--folder FOLDER] [--train-only] [--texts FILE ...]
                [--batch-rows 4] [--num-layers N] [--draft-model FOLDER]

METHOD is one of `paceline train`. Its head for SmolLM2 is trained in FOLDER/METHOD on the texts that `head_texts.py`
left, for so many minutes, judging included, not so the model's states of these texts, which are computed once for all
heads; with `--steps` for so many steps, whatever each takes, so that all heads see as many tokens. `pard` begins with
`--draft-model`, else with the one of FOLDER/draft_model, a fifth of SmolLM2's layers, which is trained first;
`--num-layers` is of `p_eagle`. A run that was stopped goes on, a head that is there is measured as it is.

Of every set, `--prompts` first turns are decoded in turn with plain decoding: with a chain of 2 and of 4 drafts, with a
tree (EAGLE-2's of 8 nodes, or what the method drafts when named alone), with `auto` choosing how much the head drafts,
among the table drafters alone, and among them and the head.
Outputs must equal plain decoding's, or differ first at a near tie (counted), otherwise nothing is timed; above
temperature 0 they differ, and only speeds are compared. Every head's figures are written once it is measured, beside
those that the file holds: `results/NAME_smollm2.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from decoding import Ids, counted, differs, published, run
from head_texts import OUT as TEXTS
from real_models import WEIGHTS, smollm2

from paceline import LLM, SamplingParams
from paceline.training import Fitting, train, training_config
from paceline.utils import in_turn, speedup, tokens_per_second

PLAIN = "plain"
SETS = ("spec-bench", "gsm8k", "humaneval", "mt-redundant")
ROW_TOKENS = 640
METHODS = (
    *("eagle3", "p_eagle", "eagle", "fspad", "longspec", "mtp", "medusa", "hydra", "hydra++", "clover", "chimera"),
    *("mlp_speculator", "falcon", "dflash", "dspark", "ppd", "hidden_transfer", "m2r2", "draft_model", "pard"),
)
EAGLES = ("eagle", "fspad", "eagle3", "p_eagle", "falcon", "longspec", "mtp", "dflash", "dspark")
"""They grow EAGLE-2's trees; others have static trees of their own."""


def trained(llm: LLM, method: str, given: argparse.Namespace) -> Path:
    """The head in a folder, trained there before or now."""
    folder: Path = given.work / method
    if not (folder / "report.json").exists():
        on_disk = {"feature_disk_bytes": 8 << 30, "feature_folder": given.work / "states"}
        on_gpu = {"feature_cache_bytes": 32 << 30}
        config = training_config(
            method, data=tuple(given.texts), texts=True, **own_settings(llm, method, given),
            **(on_gpu if llm.runner.info.device.type == "cuda" else on_disk),
            fitting=Fitting(
                minutes=given.minutes, steps=given.steps, row_tokens=ROW_TOKENS, batch_rows=given.batch_rows,
                patience=1000,
            ),
        )  # fmt: skip
        train(llm, config, folder, speed_prompts=0)
    return folder


def own_settings(llm: LLM, method: str, given: argparse.Namespace) -> dict[str, Any]:
    """Of the method's training."""
    if method == "pard":
        return {"draft_model": str(given.draft_model or trained(llm, "draft_model", given))}
    return {"num_layers": given.num_layers} if method == "p_eagle" and given.num_layers else {}


def settings_of(method: str, head: Path) -> dict[str, Any]:
    """Name of a setting -> its speculative_config."""
    own = {"method": method, "model": str(head)}
    fixed = own | {"controller": "fixed"}
    eagle2 = fixed | {"tree_policy": "eagle2", "num_speculative_tokens": 8}
    return {
        "chain 2": fixed | {"num_speculative_tokens": 2},
        "chain 4": fixed | {"num_speculative_tokens": 4},
        "tree": eagle2 if method in EAGLES else own,
        "auto": own | {"controller": "auto"},
        "tables": ["ngram", "suffix"],
        "with tables": [own, "ngram", "suffix"],
    }


def of_set(llms: Mapping[str, LLM], groups: Sequence[list[Ids]], given: argparse.Namespace) -> dict[str, Any]:
    """All settings on the prompts of one set, in turn, a group at once."""
    plain = llms[PLAIN]
    params = SamplingParams(temperature=given.temperature, seed=0 if given.temperature else None,
                            max_tokens=given.tokens)  # fmt: skip
    for llm in llms.values():
        run(llm, groups[0], params)
    calls = {name: lambda group, _, llm=llm: run(llm, group, params) for name, llm in llms.items()}
    turns = list(in_turn(calls, groups, given.repeats))
    if not given.temperature:
        check(plain, groups, turns)
    seconds = {name: np.array([[turn.seconds[name]] for turn in turns]) for name in llms}
    tokens = {name: np.array([[float(sum(map(written, turn.outputs[name])))] for turn in turns]) for name in llms}
    found = {}
    for name in llms:
        rate = tokens_per_second(tokens[name], seconds[name])
        over = speedup(tokens[PLAIN], seconds[PLAIN], tokens[name], seconds[name])
        if rate is None or over is None:
            raise SystemExit("nothing was measured")
        outputs = [one for turn in turns for one in turn.outputs[name]]
        identical = sum(ids(turn.outputs[name]) == ids(turn.outputs[PLAIN]) for turn in turns)
        found[name] = {"identical": identical, **counted(outputs), "accepted_by_depth": by_depth(outputs),
                       "tokens_per_second": rate.to_dict(), "over_plain": over.to_dict()}  # fmt: skip
    return found


def check(plain: LLM, groups: Sequence[list[Ids]], turns: Sequence[Any]) -> None:
    """Outputs are those of plain decoding, near ties left out.

    Raises:
        SystemExit: they are not.
    """
    differ = differs(plain)
    for turn in turns:
        for name, outputs in turn.outputs.items():
            triples = zip(groups[turn.item], ids(turn.outputs[PLAIN]), ids(outputs), strict=True)
            if wrong := [why for triple in triples if (why := differ(*triple))]:
                raise SystemExit(f"{name}: outputs differ outside near ties, nothing is timed: {wrong[:3]}")


def ids(outputs: Sequence[Any]) -> list[Ids]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def written(output: Any) -> int:
    return len(output.outputs[0].token_ids)


def by_depth(outputs: Sequence[Any]) -> list[float]:
    """By depth, accepted drafts a pass."""
    steps = sum(one.metrics.num_steps for one in outputs)
    columns = zip_longest(*(one.metrics.num_accepted_tokens_per_pos for one in outputs), fillvalue=0)
    return [sum(column) / max(1, steps) for column in columns][:8]


def measured(plain: LLM, method: str, head: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A head on all sets."""
    wanted = settings_of(method, head)
    if given.settings:
        wanted = {name: wanted[name] for name in given.settings.split(",")}
    llms = {PLAIN: plain} | {name: plain.with_speculative_config(config) for name, config in wanted.items()}
    sets = {}
    for name in given.sets.split(","):
        prompts = published(plain, given.data, name, given.prompts)
        groups = [prompts[start : start + given.batch] for start in range(0, len(prompts), given.batch)]
        sets[name] = of_set(llms, groups, given)
        for setting, one in sets[name].items():
            over = one["over_plain"]
            print(f"{method:14s} {name:12s} {setting:12s} {one['tokens_per_pass']:.2f} tokens a pass, "
                  f"{over['value']:.2f} ({over['low']:.2f} to {over['high']:.2f}) times plain", flush=True)  # fmt: skip
    report = json.loads((head / "report.json").read_text())
    return {"sets": sets, "speculative_configs": {k: _portable(v, head) for k, v in wanted.items()}, "head": report}


def _portable(config: Any, head: Path) -> Any:
    return json.loads(json.dumps(config).replace(str(head), head.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--texts", type=Path, nargs="+", default=[TEXTS])
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--settings", help="some of them, as 'chain 2,tree'; all by default")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--name", default="heads")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    plain = LLM(smollm2(), speculative_config=None, threads=given.threads, enable_prefix_caching=False)
    file = given.folder / f"{given.name}_smollm2.json"
    for method in given.methods:
        head = trained(plain, method, given)
        if given.train_only:
            continue
        fields = {key: getattr(given, key) for key in ("prompts", "tokens", "temperature", "batch", "repeats")}
        known = json.loads(file.read_text())["heads"] if file.exists() else {}
        made = {**fields, **measured(plain, method, head, given)}
        save(file.stem, {"model": WEIGHTS, "heads": {**known, method: made}}, given.folder)


if __name__ == "__main__":
    main()
