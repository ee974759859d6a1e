"""The draft: a one-layer Llama that learns what the target would say next.

Reads a corpus folder, a target folder, the texts that the target wrote itself (write.py).
Writes a model folder with the target's tokenizer.

Three things make one layer go far:
- it learns the target's distribution (its 16 likeliest tokens and the mass of all others), mixed with the greedy token
  itself;
- it learns on answers only, mostly on the target's own, since nothing else is ever drafted;
- it starts from the target: the head is the best low-rank form of the target's, and every token's input row is the mean
  final state that the target reaches on that token, so that the untrained draft is already a bigram model of the
  target.

Sources: Hinton et al. 2015 (arXiv:1503.02531); DistillSpec (arXiv:2310.08461).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.training import paced, update
from recipes.bundled_pair.corpus import llama_config, load_model, load_tokenizer, pick_device, save_model
from recipes.bundled_pair.lessons import Lessons, Reached, School, load_school, make_school, mixed_batches, save_school
from recipes.common.options import add_flags, new_parser

# Axes in this file: n = tokens, k = likeliest tokens kept, v = vocabulary, h = the target's width, w = the draft's
# width.


@torch.no_grad()
def start_from(target: LlamaForCausalLM, draft: LlamaForCausalLM, reached: Reached) -> None:
    """Give the draft the head and the per-token states of the target, both in their best common basis of the draft's
    width.

    With head H (v x h) and states s of second moment C = L L^T, the truncated SVD of H L is the best approximation of
    the logits H s in mean square: head U S^(1/2), states S^(1/2) V^T L^-1 s.
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
    """KL from target to draft over the kept tokens and the lumped rest, mixed with cross-entropy to the target's greedy
    token.
    """
    log_q_nk = logits_nv.gather(1, best_nk) - logits_nv.logsumexp(-1, keepdim=True)
    p_nk = log_p_nk.exp()
    rest_p_n = (1 - p_nk.sum(-1)).clamp(min=1e-6)
    rest_q_n = (1 - log_q_nk.exp().sum(-1)).clamp(min=1e-6)
    kl_n = (p_nk * (log_p_nk - log_q_nk)).sum(-1) + rest_p_n * (rest_p_n.log() - rest_q_n.log())
    return (1 - greedy_share) * kl_n.mean() - greedy_share * log_q_nk[:, 0].mean()


def loss_and_agreement(draft: LlamaForCausalLM, lesson: Lessons, greedy_share: float) -> tuple[Tensor, float]:
    """The loss of one batch, and the share of its answer tokens where both models' greedy tokens are equal."""
    device = draft.device
    wanted = lesson.wanted_n.flatten().nonzero().squeeze(1)
    best_nk = lesson.best_nk.flatten(0, 1)[wanted].long().to(device)
    log_p_nk = lesson.log_p_nk.flatten(0, 1)[wanted].float().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        states = draft.model(input_ids=lesson.tokens_n.long().to(device), use_cache=False).last_hidden_state
        logits_nv = draft.lm_head(states.flatten(0, 1)[wanted.to(device)])
    agreed = (logits_nv.argmax(-1) == best_nk[:, 0]).float().mean().item()
    return distillation_loss(logits_nv.float(), best_nk, log_p_nk, greedy_share), agreed


def train(draft: LlamaForCausalLM, school: School, options: argparse.Namespace) -> float:
    """Train in place until the tokens or the minutes are used up; returns the mean loss of the last 50 steps."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches = mixed_batches(
        school.written,
        school.corpus,
        batch=options.batch,
        length=options.length,
        written_share=options.written_share,
        seed=options.seed,
    )
    losses, agreed = [], []
    for (at, last), lesson in zip(paced(optimizer, options, warmup=50), batches, strict=False):
        loss, agreement = loss_and_agreement(draft, lesson, options.greedy_share)
        update(draft, optimizer, loss)
        losses.append(loss.item())
        agreed.append(agreement)
        if at.step % 20 == 0 or last:
            seen = at.step * options.batch * options.length
            said = f"loss {fmean(losses[-20:]):.3f}  agreement {fmean(agreed[-20:]):.3f}"
            print(f"step {at.step}  tokens {seen}  {said}  {at.minutes:.1f} min", flush=True)
    return fmean(losses[-50:])


def find_school(options: argparse.Namespace, target: LlamaForCausalLM) -> School:
    """The labels, from --labels if that file exists, else made (and kept there, if given)."""
    if options.labels and options.labels.is_file():
        return load_school(options.labels)
    school = make_school(
        target,
        target_path=options.target,
        corpus=options.corpus,
        written=options.written,
        corpus_tokens=options.corpus_tokens,
        k=options.k,
        length=options.length,
        seed=options.seed,
    )
    if options.labels:
        save_school(school, options.labels)
    return school


def distill(options: argparse.Namespace) -> float:
    """Make the draft; returns its last training loss."""
    torch.manual_seed(options.seed)
    target = load_model(options.target, pick_device(options.device))
    school = find_school(options, target)
    config = llama_config(
        width=options.width,
        layers=1,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mlp=options.mlp,
        tied=options.tied,
    )
    draft = LlamaForCausalLM(config).to(target.device)
    start_from(target, draft, school.reached)
    loss = train(draft, school, options)
    save_model(draft, load_tokenizer(options.target), options.out)
    return loss


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "corpus", "target", out=Path("build/draft"))
    parser.add_argument(
        "--written", type=Path, default=Path("build/written.jsonl"), help="what write.py made (%(default)s)"
    )
    parser.add_argument("--labels", type=Path, help="file to keep the target's labels in, for further runs")
    add_flags(parser, "kv_heads", width=192, heads=2, mlp=512)
    parser.add_argument(
        "--tied", action="store_true", help="one table for input and head; half the file, less agreement"
    )
    add_flags(parser, tokens=12_000_000, minutes=25)
    parser.add_argument(
        "--corpus-tokens", type=int, default=1_200_000, help="of the corpus, label about so many (%(default)s)"
    )
    parser.add_argument(
        "--written-share", type=float, default=0.8, help="share of the target's own texts (%(default)s)"
    )
    parser.add_argument(
        "--greedy-share", type=float, default=0.5, help="weight of the greedy token in the loss (%(default)s)"
    )
    parser.add_argument("--k", type=int, default=16, help="likeliest tokens kept as labels (%(default)s)")
    add_flags(parser, "device", batch=16, length=512, rate=4e-3, seed=1)
    distill(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
