"""Tokens and steps of every method with SmolLM2-135M-Instruct in bfloat16, greedy, one prompt at a time, 4 tokens a
draft.

Each prompt has a hash of its tokens and its number of passes. Adapters and heads are random; the target itself stands
for a draft model, and the bundled draft for one with another tokenizer. There is no diffusion model with its tokenizer,
so DiffuSpec and DEER are not here. bfloat16 sums differ by CPU: the file names the one it was made on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

from golden.golden import CACHE, Skipped

from benchmarks.stand_ins import adapter_weights, random_head, written_adapter, written_rate_adapters
from paceline import LLM, SamplingParams, registry
from paceline.bench.bundled import smollm2_folder
from paceline.bench.machine import machine_facts
from paceline.drafters.retrieval import DatastoreWriter
from paceline.llm import BUNDLED

TOKENS, NUMBER, THREADS, WIDTH, LAYERS, VOCAB = 48, 4, 2, 576, 30, 49152
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, then one that returns a list of the first n.",
    "List ten European countries with their capitals, one per line.",
    "Translate into French: The train to the coast leaves at nine, and the train to the mountains leaves at ten.",
    "Repeat this sentence with 'cat' in place of 'dog': The old dog slept by the door while the young dog chased the "
    "ball.",
    "A box holds 12 pens. Tom buys 7 boxes and gives 15 pens away. How many pens are left? Explain step by step.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    'Give three books as a JSON list of objects with the keys "title", "author" and "year".',
    "Summarise in two sentences: Bees visit flowers to gather nectar. While they do so, they carry pollen from flower "
    "to flower, and so plants bear fruit. Where bees vanish, harvests shrink.",
)
PREDICTED = "def fibonacci(n):\n    if n <= 1:\n        return n\n    return fibonacci(n-1) + fibonacci(n-2)\n"
ABSENT = ("diffuspec", "deer", "encdec_draft", "pard", "longspec", "dovetail")
NEEDS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    **dict.fromkeys(("draft_model", "pearl", "s2d", "easyspec"), lambda target, folder: {"model": target}),
    **dict.fromkeys(("tli", "slem"), lambda target, folder: {"model": str(BUNDLED / "draft")}),
    **dict.fromkeys(("rest", "rasd"), lambda target, folder: {"datastore": str(folder / "texts.datastore")}),
    **dict.fromkeys(
        ("eagle", "eagle2"), lambda target, folder: {"model": random_head("eagle", WIDTH, VOCAB, heads=9, tokens=8000)}
    ),
    "eagle3": lambda target, folder: {"model": random_head("eagle3", WIDTH, VOCAB, heads=9, tokens=8000)},
    **{
        name: lambda target, folder, name=name: {"model": random_head(name, WIDTH, VOCAB, heads=9, tokens=8000)}
        for name in ("fspad", "p_eagle", "dflash", "dspark")
    },
    "m2r2": lambda target, folder: {"model": written_rate_adapters(WIDTH, LAYERS, 4)},
    "kangaroo": lambda target, folder: {
        "model": written_adapter(adapter_weights(WIDTH), WIDTH, heads=9),
        "draft_stop_threshold": 0.0,
    },
}
FIXED: dict[str, dict[str, Any]] = {
    "pearl": {"overlap": True},
    "s2d": {"draft_exits": [8, 16], "draft_exit_thresholds": 0.5},
    "layer_skip": {"resume_verification": True},
    "del": {"resume_verification": True},
}
"""Options of which a measurement would choose."""


def decoded(llm: LLM, prompts: Sequence[list[int]], **more: Any) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return [llm.generate({"prompt_token_ids": ids, **more}, params)[0] for ids in prompts]


def shown(outputs: Sequence[Any], *, timed: bool = False) -> dict[str, Any]:
    dropped = [out.metrics.dropped_drafters for out in outputs if out.metrics.dropped_drafters]
    assert not dropped, dropped
    tokens = [sha256(repr(out.outputs[0].token_ids).encode()).hexdigest()[:12] for out in outputs]
    if timed:
        return {"tokens": tokens}
    steps = [out.metrics.num_steps for out in outputs]
    return {"tokens": tokens, "steps": steps, "tokens per pass": round(TOKENS * len(outputs) / sum(steps), 3)}


def found(golden: Any) -> dict[str, Any]:
    facts = machine_facts()
    cpu = f"{facts['cpu']}, {facts['capability']}"
    if golden and golden["cpu"] != cpu:
        raise Skipped(f"the file was made on {golden['cpu']}, this is {cpu}")
    with mock.patch.dict(os.environ):
        os.environ.pop("PACELINE_CACHE_DIR")
        os.environ |= {"PACELINE_CACHE_DIR": CACHE} if CACHE else {}
        target = str(smollm2_folder())
    if not (Path(target) / "config.json").exists():
        raise Skipped(f"no {target}; benchmarks/real_models.py makes it")
    plain = LLM(target, speculative_config=None, dtype="bfloat16", threads=THREADS, seed=1, enable_prefix_caching=False)
    prompts = [plain.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    outputs = decoded(plain, prompts)
    made: dict[str, Any] = {
        "cpu": cpu,
        "plain": shown(outputs),
        "auto": shown(decoded(plain.with_speculative_config("{}"), prompts), timed=True),
    }
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        with DatastoreWriter(folder / "texts.datastore", plain.tokenizer) as writer:
            for ids, out in list(zip(prompts, outputs, strict=True))[::2]:
                writer.add([*ids, *out.outputs[0].token_ids])
                writer.end_document()
            writer.finish(1)
        for name in registry.DRAFTERS:
            if name in ABSENT:
                continue
            config: dict[str, Any] = {"method": name, "num_speculative_tokens": NUMBER} | FIXED.get(name, {})
            config |= NEEDS[name](target, folder) if name in NEEDS else {}
            more = {"prediction": PREDICTED} if name == "prediction" else {}
            made[name] = shown(decoded(plain.with_speculative_config(config), prompts, **more))
            print(f"{name}: {made[name]['tokens per pass']} tokens per pass", flush=True)
    return made
