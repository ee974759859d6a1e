"""Texts that the target writes itself, for the draft to learn from.

Reads a corpus folder, a target folder. Only prompts of training documents are used.
Writes OUT (JSON lines): source, temperature, prompt ids, ids of the continuation.

A draft says what the target would say next, so the target's own words are better lessons than its corpus
(sequence-level distillation, Kim and Rush 2016, arXiv:1606.07947; for drafts DistillSpec, arXiv:2310.08461).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.bundled_pair.corpus import (
    Document,
    encode,
    load_model,
    load_tokenizer,
    pick_device,
    prompt_of,
    read_documents,
    shuffled,
)
from recipes.common.options import add_flags, new_parser

FUNCTION = re.compile(r'^ *(?:async )?def \w+\([^\n]*\).*:\n +"""', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the target is asked to continue."""

    source: str
    ids: list[int]


def function_starts(text: str, tokenizer: PreTrainedTokenizerFast, length: int) -> Iterator[list[int]]:
    """Openings of a module's functions, with what stands shortly before them."""
    for found in FUNCTION.finditer(text):
        yield encode(tokenizer, [text[max(0, found.start() - 60) : found.end() + 100]])[0][:length]


def slices(ids: list[int], length: int, seed: int) -> Iterator[list[int]]:
    """Beginnings for free continuation, cut from a long text at random places, about one in every eight lengths."""
    generator = torch.Generator().manual_seed(seed)
    count = len(ids) // (8 * length)
    for start in torch.randint(0, max(len(ids) - length, 1), (count,), generator=generator).tolist():
        yield ids[start : start + length]


def make_prompts(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, seed: int, length: int = 64
) -> list[Prompt]:
    """One prompt a chat document; openings of functions and random slices of plain text."""
    prompts = []
    for index, document in enumerate(d for d in documents if not d.heldout):
        asked = prompt_of(document.text)
        if asked is not None:
            prompts.append(Prompt(source=document.source, ids=encode(tokenizer, [asked])[0]))
            continue
        ids = encode(tokenizer, [document.text])[0]
        starts = [*slices(ids, length, seed + index)]
        if document.source == "code":
            starts += function_starts(document.text, tokenizer, length)
        prompts += [Prompt(source=document.source, ids=start) for start in starts]
    return [prompts[i] for i in shuffled(len(prompts), seed)]


def left_padded(prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
    """(batch, longest) int64 ids and attention mask, prompts to the right."""
    longest = max(len(p.ids) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p.ids)) + p.ids for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in prompts])
    return ids, mask


def trim(ids: list[int], ends: tuple[int, ...] = (0, 3)) -> list[int]:
    """Ids up to and with the first end token."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: stop + 1]


@torch.inference_mode()
def continue_batch(
    model: LlamaForCausalLM, prompts: list[Prompt], *, temperature: float, new_tokens: int
) -> list[list[int]]:
    ids, mask = left_padded(prompts)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    written = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **sampling,
    )
    return [trim(row) for row in written[:, ids.shape[1] :].tolist()]


def write(options: argparse.Namespace) -> int:
    """Continue every prompt once, the temperatures taking turns batch by batch; returns the number of tokens
    written.
    """
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(options.target)
    model = load_model(options.target, pick_device(options.device))
    prompts = [
        p
        for p in make_prompts(read_documents(options.corpus), tokenizer, options.seed)
        if len(p.ids) <= options.longest
    ]
    prompts = prompts[: options.prompts or None]
    total, done, start = 0, 0, time.perf_counter()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w") as file:
        for group, temperature in zip(batches(prompts, options.batch), cycle(options.temperatures), strict=False):
            answers = continue_batch(model, group, temperature=temperature, new_tokens=options.new_tokens)
            for prompt, answer in zip(group, answers, strict=True):
                row = {"source": prompt.source, "temperature": temperature, "prompt": prompt.ids, "ids": answer}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
            total, done = total + sum(map(len, answers)), done + len(group)
            print(
                f"{done}/{len(prompts)} prompts  {total} tokens  {total / (time.perf_counter() - start):.0f}/s",
                flush=True,
            )
    return total


def batches(prompts: list[Prompt], size: int, pool: int = 16) -> Iterator[list[Prompt]]:
    """Batches of prompts of similar length, from pools of `pool` batches, so that an early stop still leaves a fair
    sample.
    """
    for first in range(0, len(prompts), size * pool):
        near = sorted(prompts[first : first + size * pool], key=lambda p: len(p.ids))
        yield from (near[i : i + size] for i in range(0, len(near), size))


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "corpus", "target", out=Path("build/written.jsonl"))
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.4, 0.0, 0.7], help="0 is greedy (%(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=0, help="how many prompts to use; 0 is all")
    parser.add_argument("--longest", type=int, default=400, help="longer prompts are left out (%(default)s tokens)")
    add_flags(parser, "device", new_tokens=144, batch=128, seed=1)
    write(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
