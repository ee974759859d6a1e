"""What a drafted token costs behind long texts, and what the draft keeps of them: LongSpec's head, which reads the
target's keys, beside an EAGLE head that has cached the whole text; one row each, in turn.

usage: long_drafts.py [--model smollm2] [--contexts 2048,8192,16384,32768] [--tokens 8192] [--repeats 50] [--threads 2]

Heads have the target's shapes and random weights, and caches random numbers, which take as long as true ones: this
measures cost and no quality. They draft the first `--tokens` tokens. Figures are printed, and written to
`results/long_drafts_MODEL.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import alternate, ratio, save
from decoding import add_model, model_of
from stand_ins import head_weights, written_head

from paceline import LLM
from paceline.models.heads import HeadConfig
from paceline.models.runners import FeatureHead, LongSpecHead, NativeRunner
from paceline.models.state import NativeCache
from paceline.tree import EMPTY_TREE

EAGLE, LONGSPEC = "eagle", "longspec"
WINDOW = 512


def head_of(llm: LLM, method: Any, tokens: int, **more: Any) -> str:
    """Path of a head of the target's shapes."""
    info, spec = llm.runner.info, llm.runner.spec  # type: ignore[attr-defined]  # a native runner
    layer = {"num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    layer |= {"intermediate_size": spec.intermediate_size, "max_position_embeddings": spec.max_context}
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": tokens}
    config = HeadConfig(method=method, layer=layer, **sizes, **more)
    return written_head(config, head_weights(config))


@torch.inference_mode()
def filled(runner: NativeRunner, context: int) -> NativeCache:
    """A sequence of so many tokens."""
    cache = runner.open()
    cache.reserve(context + 1)
    cache.length = context
    for layer in runner.arena.layers[-1:]:
        layer[torch.from_numpy(cache.slot_index(0, context))] = torch.randn(context, *layer.shape[1:]).to(layer.dtype)
    return cache


def eagle_row(head: FeatureHead, context: int, llm: LLM) -> tuple[Callable[[], Any], int]:
    """A pass of one drafted token behind a text of so many, and the bytes of its cache."""
    cache, info = filled(head.runner, context), llm.runner.info
    states = head.joined(torch.randn(1, info.hidden_size).to(info.device, info.dtype))
    kept = head.runner.arena.layers[0][0]

    def row() -> Any:
        return head.step([cache], [EMPTY_TREE], [0], tokens=[7], states=states, picked=[0]).logits.argmax().item()

    return row, context * kept.nbytes


def longspec_row(head: LongSpecHead, context: int, target: NativeCache) -> tuple[Callable[[], Any], int]:
    """The same; the target's keys are looked up each time."""
    (window,) = head.known([[5] * WINDOW], [context - WINDOW])

    def row() -> Any:
        inputs = head.opened(context, window, target)
        inputs.feed(7)
        return head.step([inputs]).argmax().item()

    return row, window.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--contexts", default="2048,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = model_of(given.model)
    llm = model.open(threads=given.threads)
    tokens = min(given.tokens, llm.runner.info.vocab_size)
    found = []
    for context in map(int, given.contexts.split(",")):
        eagle = FeatureHead.load(head_of(llm, EAGLE, tokens), llm.runner, [EAGLE])
        longspec = LongSpecHead.load(head_of(llm, LONGSPEC, tokens, sliding_window=WINDOW), llm.runner)
        target = filled(llm.runner, context)  # type: ignore[arg-type]  # a native runner
        rows = {EAGLE: eagle_row(eagle, context, llm), LONGSPEC: longspec_row(longspec, context, target)}
        seconds = alternate({name: row for name, (row, _) in rows.items()}, given.repeats)
        llm.runner.release(target)
        share, kept = ratio(seconds[LONGSPEC], seconds[EAGLE]), {name: held for name, (_, held) in rows.items()}
        middle = {name: float(np.median(each)) for name, each in seconds.items()}
        found.append({"context": context, "seconds": middle, "longspec_over_eagle": share, "bytes_kept": kept})
        print(
            f"{context:6d} tokens: eagle {1e3 * middle[EAGLE]:.3f} ms, longspec {1e3 * middle[LONGSPEC]:.3f} ms, "
            f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f}) of it; keeps "
            f"{kept[EAGLE] / 2**20:.2f} and {kept[LONGSPEC] / 2**20:.2f} MiB", flush=True,
        )  # fmt: skip
    fields = {"tokens": tokens, "window": WINDOW, "repeats": given.repeats, "threads": given.threads}
    save(f"long_drafts_{model.name}", {"model": model.weights, **fields, "contexts": found})


if __name__ == "__main__":
    main()
