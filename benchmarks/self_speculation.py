"""DEL against plain decoding and every fixed exit and length, task by task.

usage: self_speculation.py --data FOLDER [--model smollm2] [--tasks spec-bench,humaneval,gsm8k,mt-redundant]
                           [--exits 8,15,22] [--lengths 1,2,4] [--prompts 4] [--tokens 64] [--repeats 3] [--threads 2]

SmolLM2 was not trained to exit early, so that its first layers guess badly: give a model that was, as what
`paceline train layer_skip` makes. FOLDER holds the published prompt sets (`methods.py`). Plain decoding, DEL and
all fixed settings decode each prompt in turn. Outputs must equal those of plain decoding, or differ first at a near tie
(counted); otherwise nothing is timed. Every task has its own engines, so that DEL comes to it without being told
anything; what it learns from one prompt serves the next ones of the same turn. The fixed setting that it is compared
with is the fastest of the other half of the turns. Results: `results/self_speculation_MODEL.json`, `.png`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import RESULTS, pyplot, save
from decoding import Ids, add_model, counted, model_of, must_agree, published, run
from methods import FILES

from paceline import LLM, SamplingParams
from paceline.utils import Estimate, in_turn, speedup

Array = npt.NDArray[np.float64]
PLAIN, DEL = "plain", "del"


def settings(given: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative_config."""
    fixed = {
        f"exit {e}, {d} tokens": {"method": "layer_skip", "exit_layer": e, "num_speculative_tokens": d}
        for e in given.exits
        for d in given.lengths
    }
    return {PLAIN: None, DEL: {"method": "del", "num_speculative_tokens": max(given.lengths)}, **fixed}


def task(plain: LLM, given: argparse.Namespace, prompts: list[Ids]) -> dict[str, Any]:
    """One set of prompts under all settings."""
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    llms = {
        name: plain if config is None else plain.with_speculative_config(config)
        for name, config in settings(given).items()
    }
    reference: list[Ids] = []
    checked: dict[str, Any] = {}
    for name, llm in llms.items():
        results = [run(llm, [prompt], params)[0] for prompt in prompts]
        outputs = [one.outputs[0].token_ids for one in results]
        reference = reference or outputs
        checked[name] = {
            "agreement": must_agree(plain, prompts, reference, outputs, what=name),
            "drafting": counted(results),
        }

    def decode(llm: LLM, prompt: Ids, repeat: int) -> None:
        llm.generate([{"prompt_token_ids": prompt, "cache_salt": f"turn {repeat}"}], params)

    seconds = {name: np.zeros((len(prompts), given.repeats)) for name in llms}
    for turn in in_turn({name: partial(decode, llm) for name, llm in llms.items()}, prompts, given.repeats):
        for name, taken in turn.seconds.items():
            seconds[name][turn.item, turn.repeat] = taken
    return {"checked": checked, "figures": figures(seconds, given.tokens)}


def figures(seconds: Mapping[str, Array], tokens: int) -> dict[str, Any]:
    """Ratios over plain decoding, and of DEL over the fastest fixed setting, with 95 % intervals."""
    count = np.full_like(seconds[PLAIN], tokens)
    over = {name: _dict(speedup(count, seconds[PLAIN], count, own)) for name, own in seconds.items() if name != PLAIN}
    fixed = {name: one["value"] for name, one in over.items() if name.startswith("exit")}
    turns, fastest = fastest_of_others(seconds)
    against = _dict(speedup(count[:, turns], fastest, count[:, turns], seconds[DEL][:, turns]))
    return {
        "over_plain": over,
        "fastest_fixed": max(fixed, key=lambda name: fixed[name]),
        "over_fastest_fixed": {DEL: against},
    }


def fastest_of_others(seconds: Mapping[str, Array]) -> tuple[list[int], Array]:
    """The turns in another order, and (prompts, turns) seconds of the fixed setting that was fastest in the *other*
    half of the turns: the fastest of many in the very turns that are compared would owe that to luck in part.
    """
    turns = seconds[PLAIN].shape[1]
    halves = [list(range(first, turns, 2)) for first in (0, 1)] if turns > 1 else [[0], [0]]
    parts = []
    for own, other in (halves, halves[::-1]):
        fastest = min(
            (name for name in seconds if name.startswith("exit")), key=lambda name: float(seconds[name][:, other].sum())
        )
        parts.append(seconds[fastest][:, own])
    return halves[0] + halves[1], np.concatenate(parts, 1)


def _dict(estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        raise SystemExit("nothing was measured")
    return estimate.to_dict()


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Speed of every setting over plain decoding, a column a task."""
    plt = pyplot()
    figure, panels = plt.subplots(
        1, len(result["tasks"]), figsize=(4 * len(result["tasks"]), 3.6), sharey="row", squeeze=False
    )
    for panel, (name, one) in zip(panels[0], result["tasks"].items(), strict=True):
        _draw(panel, {setting: over["value"] for setting, over in one["figures"]["over_plain"].items()})
        panel.set(title=name, xlabel="drafted tokens a round")
    panels[0][0].set_ylabel("speed, times plain decoding")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw(panel: Any, values: Mapping[str, float]) -> None:
    """Fixed settings as points over their length, a line an exit; DEL as a level line."""
    exits: dict[str, list[tuple[int, float]]] = {}
    for setting, value in values.items():
        if setting.startswith("exit"):
            exit_layer, length = setting.split(", ")
            exits.setdefault(exit_layer, []).append((int(length.split()[0]), value))
    for exit_layer, points in exits.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=exit_layer)
    panel.axhline(values[DEL], color="black", label=DEL)
    panel.axhline(1.0, color="grey", linewidth=0.5)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(FILES))
    parser.add_argument("--exits", type=numbers, default=[8, 15, 22])
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--plot-only", action="store_true", help="draw the plot again from the results")
    given = parser.parse_args()
    model = model_of(given.model)
    path = given.folder / f"self_speculation_{model.name}.json"
    if not given.plot_only:
        plain = model.open(threads=given.threads)
        tasks = {name: task(plain, given, published(plain, given.data, name, given.prompts)) for name in given.tasks}
        asked = {key: getattr(given, key) for key in ("exits", "lengths", "prompts", "tokens", "repeats")}
        save(path.stem, {"asked": asked, "model": model.weights, "tasks": tasks}, given.folder)
    plot(json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
