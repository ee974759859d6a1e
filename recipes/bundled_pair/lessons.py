"""What the draft learns from: token streams, and what the target says after each token of them.

The labels are computed once, so that many passes and several shapes can use them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.bundled_pair.corpus import (
    VOCAB_SIZE,
    encode,
    join,
    load_tokenizer,
    prompt_of,
    read_documents,
    shuffled,
    windows,
)

# Axes in this file: n = tokens of a stream, b = batch, t = window, k = likeliest tokens kept, v = vocabulary, h =
# target's width.

LABEL_BATCH = 32


@dataclass(slots=True, kw_only=True)
class Lessons:
    """A stream of tokens and what the target says after each of them."""

    tokens_n: Tensor  # int16
    wanted_n: Tensor  # bool: the next token belongs to an answer
    best_nk: Tensor  # int16: likeliest next tokens, best first
    log_p_nk: Tensor  # float16: their log-probabilities


@dataclass(slots=True, kw_only=True)
class Reached:
    """Where the target's final hidden states lie: per-token sums and counts, and the second moment over all tokens."""

    sums_vh: Tensor
    counts_v: Tensor
    moment_hh: Tensor


def corpus_stream(corpus: Path, tokenizer: PreTrainedTokenizerFast, most: int) -> tuple[Tensor, Tensor]:
    """Tokens of the training documents, about `most` of them, and a mask: the next token is an answer's or plain
    text's.
    """
    documents = [d for d in read_documents(corpus) if not d.heldout]
    size = sum(len(d.text) for d in documents) // 3  # tokens, roughly
    documents = documents[: max(1, len(documents) * min(most, size) // size)]
    bodies = encode(tokenizer, [d.text for d in documents])
    prompts = encode(tokenizer, [prompt_of(d.text) or "" for d in documents])
    return stream(bodies, [len(p) for p in prompts])


def written_stream(path: Path, seed: int) -> tuple[Tensor, Tensor]:
    """The same for the texts that the target wrote."""
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    rows = [rows[i] for i in shuffled(len(rows), seed)]
    return stream([row["prompt"] + row["ids"] for row in rows], [len(row["prompt"]) for row in rows])


def stream(bodies: list[list[int]], prompt_lengths: list[int]) -> tuple[Tensor, Tensor]:
    wanted = []
    for body, asked in zip(bodies, prompt_lengths, strict=True):
        unasked = max(asked - 1, 0)
        wanted += [False] * unasked + [True] * (len(body) - unasked - 1) + [False, False]
    return join(bodies), torch.tensor(wanted)


@torch.inference_mode()
def label(
    target: LlamaForCausalLM, tokens_n: Tensor, wanted_n: Tensor, reached: Reached, *, k: int, length: int
) -> Lessons:
    """What the target says along a stream, in windows of `length`; adds to `reached`."""
    device = target.device
    best_nk = torch.zeros(len(tokens_n), k, dtype=torch.int16)
    log_p_nk = torch.full((len(tokens_n), k), -torch.inf, dtype=torch.float16)
    start, step = time.perf_counter(), LABEL_BATCH * length
    whole = len(tokens_n) // length * length
    for first in range(0, whole, step):
        x_bt = tokens_n[first : min(first + step, whole)].view(-1, length).long().to(device)
        state_nh = target.model(input_ids=x_bt, use_cache=False).last_hidden_state.flatten(0, 1)
        here = wanted_n[first : first + x_bt.numel()].nonzero().squeeze(1)
        state_nh = state_nh[here.to(device)]
        log_p_nv = target.lm_head(state_nh).float().log_softmax(-1)
        log_p, best = log_p_nv.topk(k)
        best_nk[first + here], log_p_nk[first + here] = best.short().cpu(), log_p.half().cpu()
        state_nh, on = state_nh.float().cpu(), tokens_n[first + here].long()
        reached.sums_vh.index_add_(0, on, state_nh)
        reached.counts_v.index_add_(0, on, torch.ones(len(on)))
        reached.moment_hh += state_nh.T @ state_nh
        if first // step % 20 == 0:
            done = first + x_bt.numel()
            print(f"labelled {done}/{whole}  {done / (time.perf_counter() - start):.0f}/s", flush=True)
    wanted_n = wanted_n.clone()
    wanted_n[whole:] = False
    return Lessons(tokens_n=tokens_n, wanted_n=wanted_n, best_nk=best_nk, log_p_nk=log_p_nk)


def mixed_batches(
    written: Lessons, corpus: Lessons, *, batch: int, length: int, written_share: float, seed: int
) -> Iterator[Lessons]:
    """Endless batches: rows from the target's own texts and from the corpus, in fixed proportion."""
    own = round(batch * written_share)
    parts = [(source, size) for source, size in ((written, own), (corpus, batch - own)) if size]
    streams = [
        (source, windows(len(source.tokens_n), length, size, seed + i)) for i, (source, size) in enumerate(parts)
    ]
    while True:
        picked = [(source, next(index)) for source, index in streams]
        yield Lessons(
            tokens_n=torch.cat([s.tokens_n[i] for s, i in picked]),
            wanted_n=torch.cat([s.wanted_n[i] for s, i in picked]),
            best_nk=torch.cat([s.best_nk[i] for s, i in picked]),
            log_p_nk=torch.cat([s.log_p_nk[i] for s, i in picked]),
        )


@dataclass(slots=True, kw_only=True)
class School:
    """Both streams with their labels, and the target's states on them."""

    written: Lessons
    corpus: Lessons
    reached: Reached


def make_school(
    target: LlamaForCausalLM,
    *,
    target_path: Path,
    corpus: Path,
    written: Path,
    corpus_tokens: int,
    k: int,
    length: int,
    seed: int,
) -> School:
    """Label the target's own texts and about `corpus_tokens` tokens of the corpus."""
    width = target.config.hidden_size
    reached = Reached(
        sums_vh=torch.zeros(VOCAB_SIZE, width), counts_v=torch.zeros(VOCAB_SIZE), moment_hh=torch.zeros(width, width)
    )
    own, taught = written_stream(written, seed), corpus_stream(corpus, load_tokenizer(target_path), corpus_tokens)
    return School(
        written=label(target, *own, reached, k=k, length=length),
        corpus=label(target, *taught, reached, k=k, length=length),
        reached=reached,
    )


def save_school(school: School, path: Path) -> None:
    parts = {part.name: getattr(school, part.name) for part in fields(School)}
    save_file(
        {f"{name}.{f.name}": getattr(part, f.name).contiguous() for name, part in parts.items() for f in fields(part)},
        path,
    )


def load_school(path: Path) -> School:
    kept: dict[str, dict[str, Tensor]] = {"written": {}, "corpus": {}, "reached": {}}
    for name, tensor in load_file(path).items():
        part, _, field_name = name.partition(".")
        kept[part][field_name] = tensor
    return School(
        written=Lessons(**kept["written"]), corpus=Lessons(**kept["corpus"]), reached=Reached(**kept["reached"])
    )
