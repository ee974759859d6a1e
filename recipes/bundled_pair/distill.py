"""The draft: a one-layer Llama that learns what the target would say next.

In:  a corpus folder, a target folder, the texts that the target wrote itself (write.py).
Out: a model folder with the target's tokenizer.
Not here: how fast a step of it is; that follows from the shape (one layer, few operators, a head of 6144 x width).

Three things make one layer go far:
- it learns the target's distribution (its 16 likeliest tokens and the mass of all others), mixed with the greedy token itself;
- it learns on answers only, mostly on the target's own, since nothing else is ever drafted;
- it starts from the target: the head is the best low-rank form of the target's, and every token's input row is the mean final
  state that the target reaches on that token, so that the untrained draft is already a bigram model of the target.

Sources: Hinton et al. 2015 (arXiv:1503.02531); DistillSpec (arXiv:2310.08461).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from common import (
    VOCAB_SIZE,
    encode,
    join,
    learning_rate,
    llama_config,
    load_model,
    load_tokenizer,
    pick_device,
    prompt_of,
    read_documents,
    save_model,
    shuffled,
    windows,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# Axes in this file: n = tokens of a stream, b = batch, t = window, k = likeliest tokens kept, v = vocabulary, h = target's width.


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
    """Tokens of the training documents, at most about `most`, and a mask of positions whose next token is an answer's or plain text's."""
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
def label(target: LlamaForCausalLM, tokens_n: Tensor, wanted_n: Tensor, reached: Reached, *, k: int, length: int) -> Lessons:
    """What the target says along a stream, in windows of `length`; adds to `reached`."""
    device, batch = target.device, 32
    best_nk = torch.zeros(len(tokens_n), k, dtype=torch.int16)
    log_p_nk = torch.full((len(tokens_n), k), -torch.inf, dtype=torch.float16)
    start, step = time.perf_counter(), batch * length
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


@torch.no_grad()
def start_from(target: LlamaForCausalLM, draft: LlamaForCausalLM, reached: Reached) -> None:
    """Give the draft the head and the per-token states of the target, both in their best common basis of the draft's width.

    With head H (v x h) and states s of second moment C = L L^T, the truncated SVD of H L is the best approximation of the logits
    H s in mean square: head U S^(1/2), states S^(1/2) V^T L^-1 s.
    """
    head_vh = target.lm_head.weight.float().cpu()
    moment_hh = reached.moment_hh / reached.counts_v.sum().clamp(min=1)
    root_hh = torch.linalg.cholesky(moment_hh + 1e-4 * moment_hh.diagonal().mean() * torch.eye(len(moment_hh)))
    u_vw, s_w, v_wh = torch.linalg.svd(head_vh @ root_hh, full_matrices=False)
    width = draft.config.hidden_size
    u_vw, s_w, v_wh = u_vw[:, :width], s_w[:width], v_wh[:width]
    mean_h = reached.sums_vh.sum(0) / reached.counts_v.sum().clamp(min=1)
    states_vh = (reached.sums_vh + mean_h) / (reached.counts_v[:, None] + 1)
    whitened_vh = torch.linalg.solve_triangular(root_hh, states_vh.T, upper=False).T
    states_vw = (whitened_vh @ v_wh.T) * s_w.sqrt()
    scale = states_vw.square().mean().sqrt()  # the final norm brings states to unit size; its weight restores the scale
    draft.lm_head.weight.copy_(u_vw * s_w.sqrt())
    draft.model.norm.weight.fill_(float(scale))
    if not draft.config.tie_word_embeddings:
        draft.model.embed_tokens.weight.copy_(states_vw / scale)
    for layer in draft.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.5)
        layer.mlp.down_proj.weight.mul_(0.5)


def distillation_loss(logits_nv: Tensor, best_nk: Tensor, log_p_nk: Tensor, greedy_share: float) -> Tensor:
    """KL from target to draft over the kept tokens and the lumped rest, mixed with cross-entropy to the target's greedy token."""
    log_q_nk = logits_nv.gather(1, best_nk) - logits_nv.logsumexp(-1, keepdim=True)
    p_nk = log_p_nk.exp()
    rest_p_n = (1 - p_nk.sum(-1)).clamp(min=1e-6)
    rest_q_n = (1 - log_q_nk.exp().sum(-1)).clamp(min=1e-6)
    kl_n = (p_nk * (log_p_nk - log_q_nk)).sum(-1) + rest_p_n * (rest_p_n.log() - rest_q_n.log())
    return (1 - greedy_share) * kl_n.mean() - greedy_share * log_q_nk[:, 0].mean()


def mixed_batches(written: Lessons, corpus: Lessons, *, batch: int, length: int, written_share: float, seed: int) -> Iterator[Lessons]:
    """Endless batches: rows from the target's own texts and from the corpus, in fixed proportion."""
    own = round(batch * written_share)
    parts = [(source, size) for source, size in ((written, own), (corpus, batch - own)) if size]
    streams = [(source, windows(len(source.tokens_n), length, size, seed + i)) for i, (source, size) in enumerate(parts)]
    while True:
        picked = [(source, next(index)) for source, index in streams]
        yield Lessons(
            tokens_n=torch.cat([s.tokens_n[i] for s, i in picked]),
            wanted_n=torch.cat([s.wanted_n[i] for s, i in picked]),
            best_nk=torch.cat([s.best_nk[i] for s, i in picked]),
            log_p_nk=torch.cat([s.log_p_nk[i] for s, i in picked]),
        )


def train(draft: LlamaForCausalLM, written: Lessons, corpus: Lessons, options: argparse.Namespace) -> float:
    """Train in place until the tokens or the minutes are used up; returns the mean loss of the last 50 steps."""
    device = draft.device
    optimizer = torch.optim.AdamW(draft.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    steps = max(1, options.tokens // (options.batch * options.length))
    batches = mixed_batches(
        written, corpus, batch=options.batch, length=options.length, written_share=options.written_share, seed=options.seed
    )
    start, losses, agreed = time.perf_counter(), [], []
    for step, lesson in zip(range(steps), batches, strict=False):
        progress = max(step / steps, (time.perf_counter() - start) / 60 / options.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, options.rate, warmup=min(50, steps))
        with torch.autocast(device.type, torch.bfloat16):
            state = draft.model(input_ids=lesson.tokens_n.long().to(device), use_cache=False).last_hidden_state
            wanted = lesson.wanted_n.flatten().nonzero().squeeze(1)
            logits_nv = draft.lm_head(state.flatten(0, 1)[wanted.to(device)])
        best_nk = lesson.best_nk.flatten(0, 1)[wanted].long().to(device)
        log_p_nk = lesson.log_p_nk.flatten(0, 1)[wanted].float().to(device)
        loss = distillation_loss(logits_nv.float(), best_nk, log_p_nk, options.greedy_share)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        agreed.append((logits_nv.argmax(-1) == best_nk[:, 0]).float().mean().item())
        if step % 20 == 19 or step == steps - 1:
            passed = time.perf_counter() - start
            print(
                f"step {step + 1}/{steps}  loss {fmean(losses[-20:]):.3f}  agreement {fmean(agreed[-20:]):.3f}  {passed:.0f} s",
                flush=True,
            )
    return fmean(losses[-50:])


def load_lessons(options: argparse.Namespace, target: LlamaForCausalLM) -> tuple[Lessons, Lessons, Reached]:
    """Both streams with labels; kept in OPTIONS.LABELS, if given, for runs that try other shapes."""
    if options.labels and options.labels.is_file():
        kept = torch.load(options.labels, weights_only=True)
        return Lessons(**kept["written"]), Lessons(**kept["corpus"]), Reached(**kept["reached"])
    width, tokenizer = target.config.hidden_size, load_tokenizer(options.target)
    reached = Reached(sums_vh=torch.zeros(VOCAB_SIZE, width), counts_v=torch.zeros(VOCAB_SIZE), moment_hh=torch.zeros(width, width))
    streams = written_stream(options.written, options.seed), corpus_stream(options.corpus, tokenizer, options.corpus_tokens)
    written, corpus = (label(target, *pair, reached, k=options.k, length=options.length) for pair in streams)
    if options.labels:
        fields = {name: {f: getattr(x, f) for f in x.__slots__} for name, x in zip(("written", "corpus", "reached"), (written, corpus, reached))}
        torch.save(fields, options.labels)
    return written, corpus, reached


def distill(options: argparse.Namespace) -> float:
    torch.manual_seed(options.seed)
    target = load_model(options.target, pick_device(options.device))
    written, corpus, reached = load_lessons(options, target)
    config = llama_config(
        width=options.width, layers=1, heads=options.heads, kv_heads=options.kv_heads, mlp=options.mlp, tied=options.tied
    )
    draft = LlamaForCausalLM(config).to(target.device)
    start_from(target, draft, reached)
    loss = train(draft, written, corpus, options)
    save_model(draft, load_tokenizer(options.target), options.out)
    return loss


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--target", type=Path, default=Path("build/target"))
    parser.add_argument("--written", type=Path, default=Path("build/written.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("build/draft"))
    parser.add_argument("--labels", type=Path, help="file to keep the target's labels in, for further runs")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--mlp", type=int, default=512)
    parser.add_argument("--tied", action="store_true", help="one table for input and head; half the file, less agreement")
    parser.add_argument("--tokens", type=int, default=12_000_000, help="most tokens to train on (%(default)s)")
    parser.add_argument("--minutes", type=float, default=25, help="most minutes to train for (%(default)s)")
    parser.add_argument("--corpus-tokens", type=int, default=4_000_000, help="of the corpus, label about so many (%(default)s)")
    parser.add_argument("--written-share", type=float, default=0.75, help="share of the target's own texts (%(default)s)")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="weight of the greedy token in the loss (%(default)s)")
    parser.add_argument("--k", type=int, default=16, help="likeliest tokens kept as labels (%(default)s)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    distill(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
