"""DEL against every fixed exit and length, on a model tuned for early exits, task by task.

usage: self_speculation.py --model DIR --data DIR [--tasks spec-bench,humaneval,gsm8k,mt-redundant] [--exits 1,2,3,4]
                           [--lengths 1,2,3,4] [--prompts 12] [--tokens 128] [--repeats 5] [--seconds 150] [--threads 2]

MODEL is what recipes/bundled_pair/early_exit.py makes. DATA holds the prompt sets as `paceline bench --workload` reads them; none
of their texts were trained on. Plain decoding, DEL and all fixed settings decode each prompt in turn, in an order that rotates, so
that every ratio compares runs made next to each other. Outputs must equal those of plain decoding, or differ first at a near tie
(counted); otherwise nothing is timed. Every task has its own engines, so that DEL comes to it without being told anything; what it
learns from one prompt serves the next ones of the same turn. The fixed setting that it is compared with is the best of the other
half of the turns. What does not depend on the machine is noted too: tokens per layer run, the paper's objective, of DEL that weighs
layers and of every fixed setting; there the best fixed one is chosen with hindsight.

A run stops after --seconds and goes on where it stopped when it is started again; raw results are in
`results/self_speculation.json`, and with the last repeat a plot beside them. It also notes what rounds take whose verification goes
on behind the exit, and rounds whose verification begins anew.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from batches import must_agree
from common import RESULTS, kept, pyplot, save

from paceline import LLM, SamplingParams
from paceline.bench import readers, stats
from paceline.models.decoder import LayerPlan
from paceline.models.layer_drafts import layer_drafts_of
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

Ids = list[int]
Array = npt.NDArray[np.float64]
NAME = "self_speculation"
FILES = {
    "spec-bench": "spec-bench/question.odd.jsonl",
    "humaneval": "humaneval/HumanEval.even.jsonl",
    "gsm8k": "gsm8k/test.first-half.jsonl",
    "mt-redundant": "mt-redundant/question_redundant.odd.jsonl",
}
PLAIN, DEL, PAPER = "plain", "del", "del in layers"
KEYS = ("num_draft_tokens", "num_accepted_tokens", "num_steps")
MARK = "tokens_per_layer"


def settings(given: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Name -> speculative_config."""
    most = max(given.lengths)
    fixed = {
        f"exit {e}, {d} tokens": {"method": "layer_skip", "exit_layer": e, "num_speculative_tokens": d}
        for e in given.exits
        for d in given.lengths
    }
    dynamic = {"method": "del", "num_speculative_tokens": most}
    return {PLAIN: None, DEL: dynamic, PAPER: {**dynamic, "cost": "layers"}, **fixed}


def prompts_of(llm: LLM, path: Path, count: int, longest: int = 512) -> list[Ids]:
    """First turns, spread over the file, as token ids."""
    found = []
    for one in readers.read(path).conversations:
        ids = llm.chat_ids([{"role": "user", "content": one.turns[0]}]) if one.chat else llm.tokenizer.encode(one.turns[0])
        if len(ids) <= longest:
            found.append(ids)
    return found[:: max(1, len(found) // count)][:count]


class Counted:
    """Drafts by part of a model's layers that count the layers they run."""

    def __init__(self, drafts: Any) -> None:
        self._drafts, self.layers = drafts, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafts, name)

    def chains(self, *given: Any, plan: LayerPlan, **more: Any) -> list[tuple[list[int], list[float]]]:
        found: list[tuple[list[int], list[float]]] = self._drafts.chains(*given, plan=plan, **more)
        self.layers += (plan.stop or 0) * sum(len(tokens) for tokens, _ in found)
        return found


class Task:
    """One set of prompts under all settings."""

    def __init__(self, plain: LLM, given: argparse.Namespace, prompts: list[Ids]) -> None:
        self.plain, self.prompts, self.settings = plain, prompts, settings(given)
        self.params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
        self.made: dict[str, LLM] = {}

    def decode(self, name: str, number: int, salt: str) -> tuple[Any, float]:
        """One setting on one prompt: its result and its seconds."""
        if name not in self.made:
            self.made[name] = self.plain.with_speculative_config(self.settings[name])
        prompt = {"prompt_token_ids": self.prompts[number], "cache_salt": salt}
        start = perf_counter()
        (found,) = self.made[name].generate([prompt], self.params)
        return found, perf_counter() - start

    def check(self) -> dict[str, Any]:
        """Every setting on all prompts: to warm up and to compare; what it drafts is noted."""
        reference: list[Ids] = []
        found: dict[str, Any] = {}
        for name in self.settings:
            everything, layers = self.counted(name)
            outputs = [one.outputs[0].token_ids for one in everything]
            reference = reference or outputs
            sums = {key: sum(getattr(one.metrics, key) for one in everything) for key in KEYS}
            found[name] = {"agreement": must_agree(self.plain, self.prompts, reference, outputs), "drafting": sums}
            layers += self.plain.runner.info.num_layers * sums["num_steps"]
            found[name][MARK] = sum(map(len, outputs)) / layers
        return found

    def counted(self, name: str) -> tuple[list[Any], int]:
        """A setting's results on all prompts, and how many layers its drafts ran, one row each."""
        self.decode(name, 0, "warm up")
        crew = self.made[name].engine.parts.crew
        counts = [Counted(drafter.drafts) for drafter in crew.drafters]
        for drafter, count in zip(crew.drafters, counts, strict=True):
            drafter.drafts = count
        everything = [self.decode(name, number, "check")[0] for number in range(len(self.prompts))]
        for drafter, count in zip(crew.drafters, counts, strict=True):
            drafter.drafts = count._drafts
        return everything, sum(count.layers for count in counts)

    def turn(self, repeat: int, seconds: dict[str, list[list[float]]]) -> None:
        """Every setting on every prompt, once; DEL keeps what it learned within a turn."""
        names = list(self.settings)
        for number in range(len(self.prompts)):
            first = (repeat * len(self.prompts) + number) % len(names)
            for name in names[first:] + names[:first]:
                seconds.setdefault(name, [[] for _ in self.prompts])[number].append(self.decode(name, number, f"turn {repeat}")[1])


def figures(task: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Ratios over plain decoding, and of DEL over the best fixed setting, with 95 % intervals."""
    seconds = {name: np.array(values) for name, values in task["seconds"].items()}
    count = np.full_like(seconds[PLAIN], tokens)
    over = {name: _dict(stats.speedup(count, seconds[PLAIN], count, own)) for name, own in seconds.items() if name != PLAIN}
    fixed = {name: one["value"] for name, one in over.items() if name.startswith("exit")}
    turns, best = best_of_others(seconds)
    against = {name: _dict(stats.speedup(count[:, turns], best, count[:, turns], seconds[name][:, turns])) for name in (DEL, PAPER)}
    marks = {name: one[MARK] for name, one in task["checked"].items()}
    highest = max(mark for name, mark in marks.items() if name.startswith("exit"))
    return {
        "over_plain": over,
        "best_fixed": max(fixed, key=lambda name: fixed[name]),
        "over_best_fixed": against,
        f"{MARK}_over_best_fixed": {name: marks[name] / highest for name in (DEL, PAPER)},
    }


def best_of_others(seconds: Mapping[str, Array]) -> tuple[list[int], Array]:
    """The turns in another order, and (prompts, turns) seconds of the fixed setting that was fastest in the *other* half of the
    turns: the best of many in the very turns that are compared would owe that to luck in part."""
    turns = seconds[PLAIN].shape[1]
    halves = [list(range(first, turns, 2)) for first in (0, 1)] if turns > 1 else [[0], [0]]
    parts = []
    for own, other in (halves, halves[::-1]):
        best = min((name for name in seconds if name.startswith("exit")), key=lambda name: float(seconds[name][:, other].sum()))
        parts.append(seconds[best][:, own])
    return halves[0] + halves[1], np.concatenate(parts, 1)


def _dict(estimate: stats.Estimate | None) -> dict[str, Any]:
    if estimate is None:
        raise SystemExit("nothing was measured")
    return estimate.to_dict()


def resuming(llm: LLM, turns: int = 100) -> dict[str, float]:
    """Microseconds of a plain step, and by exit and length of a round of drafting and verification, whole or behind the exit."""
    drafts, cache = layer_drafts_of(llm.runner, NAME), llm.runner.open()
    llm.runner.extend([cache], [[(7 * i) % 6000 for i in range(200)]])

    def round_of(plan: LayerPlan, length: int, *, resumed: bool) -> None:
        states: list[torch.Tensor] = []
        wanted = states if resumed else None
        ((tokens, _),) = drafts.chains([cache], [5], [length], [None], plan=plan, least=[0.0], states=wanted)
        if resumed:
            drafts.score([cache], [5], [TokenTree.chain(tokens)], [states[0][:length]], plan)
        else:
            llm.runner.score([cache], [5], [TokenTree.chain(tokens)])

    calls: dict[str, Callable[[], object]] = {"plain step": partial(llm.runner.score, [cache], [5], [EMPTY_TREE])}
    for stop, length, resumed in product((1, 2, 3), (2, 4, 8), (False, True)):
        kind = "behind the exit" if resumed else "anew"
        calls[f"exit {stop}, {length} tokens, {kind}"] = partial(round_of, LayerPlan(stop=stop), length, resumed=resumed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
    llm.runner.release(cache)
    return {name: round(1e6 * float(np.median(values)), 1) for name, values in times.items()}


def plot(result: Mapping[str, Any]) -> None:
    """Every setting over plain decoding, a column a task: in speed, and in tokens per layer."""
    plt = pyplot()
    tasks = result["tasks"]
    figure, panels = plt.subplots(2, len(tasks), figsize=(4 * len(tasks), 7), sharey="row", sharex=True, squeeze=False)
    for column, (name, task) in enumerate(tasks.items()):
        marks = {setting: one[MARK] / task["checked"][PLAIN][MARK] for setting, one in task["checked"].items()}
        times = {setting: one["value"] for setting, one in task["figures"]["over_plain"].items()}
        for panel, values in ((panels[0][column], times), (panels[1][column], marks)):
            _draw(panel, values)
        panels[0][column].set_title(name)
        panels[1][column].set_xlabel("drafted tokens a round")
    panels[0][0].set_ylabel("speed, times plain decoding")
    panels[1][0].set_ylabel("tokens per layer, times plain decoding")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{NAME}.png", dpi=120)


def _draw(panel: Any, values: Mapping[str, float]) -> None:
    """Fixed settings as points over their length, a line an exit; DEL as level lines."""
    exits: dict[str, list[tuple[int, float]]] = {}
    for setting, value in values.items():
        if setting.startswith("exit"):
            exit_layer, length = setting.split(", ")
            exits.setdefault(exit_layer, []).append((int(length.split()[0]), value))
    for exit_layer, points in exits.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=exit_layer)
    for setting, line in ((DEL, "-"), (PAPER, ":")):
        panel.axhline(values[setting], color="black", linestyle=line, label=setting)
    panel.axhline(1.0, color="grey", linewidth=0.5)


def run(given: argparse.Namespace) -> bool:
    """Go on for --seconds; whether everything is done."""
    result, deadline = kept(NAME), perf_counter() + given.seconds
    asked = {key: getattr(given, key) for key in ("exits", "lengths", "prompts", "tokens")}
    asked["weights"] = f"{zlib.crc32((given.model / 'model.safetensors').read_bytes()):08x}"
    if result.get("asked") != asked:
        result = {"asked": asked, "model": given.model.name, "tasks": {}}
    plain = LLM(str(given.model), speculative_config=None, threads=given.threads, enable_prefix_caching=False)
    result.setdefault("microseconds", resuming(plain))
    done = True
    for name in given.tasks:
        task = Task(plain, given, prompts_of(plain, given.data / FILES[name], given.prompts))
        own = result["tasks"].setdefault(name, {"seconds": {}, "repeats": 0})
        if own["repeats"] < given.repeats:
            own["checked"] = task.check()
        while own["repeats"] < given.repeats and perf_counter() < deadline:
            task.turn(own["repeats"], own["seconds"])
            own["repeats"] += 1
            own["figures"] = figures(own, given.tokens)
            save(NAME, result)
        done = done and own["repeats"] >= given.repeats
        if perf_counter() >= deadline:
            done = done and name == given.tasks[-1]
            break
    save(NAME, result)
    if done:
        plot(result)
    return done


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(FILES))
    parser.add_argument("--exits", type=numbers, default=[1, 2, 3, 4])
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 3, 4])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print("everything is measured" if run(given) else "not done yet: start it again to go on")


if __name__ == "__main__":
    main()
