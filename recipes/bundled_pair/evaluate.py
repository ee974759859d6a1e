"""How good a model is, on texts that it was not trained on.

Reads a target folder, optionally a draft folder, and prompts kept out of training: GSM8K test, HumanEval, SciTLDR dev
(--data or fetched), or the held-out documents of a corpus (--corpus).
Writes a table on the screen, and JSON with --json: held-out loss, and the draft's agreement with the target's greedy
tokens.

Agreement at depth k is the share of positions in the target's own greedy answers from which the draft's next k greedy
tokens all match. A draft whose tokens matched so far has the answer itself as its context, so one pass over the
answer gives every depth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from recipes.bundled_pair.corpus import encode, load_model, load_tokenizer, pick_device, read_documents
from recipes.bundled_pair.sources import evaluation_texts
from recipes.bundled_pair.write import Prompt, batches, continue_batch
from recipes.common.options import add_flags, new_parser

DEPTHS = (1, 2, 3, 4)


@torch.inference_mode()
def heldout_loss(model: LlamaForCausalLM, sequences: list[list[int]], longest: int = 1024) -> float:
    """Mean negative log-likelihood in nats per token, each text on its own."""
    total, count = 0.0, 0
    for ids in sequences:
        x_t = torch.tensor(ids[:longest], device=model.device)
        logits_tv = model(input_ids=x_t[None], use_cache=False).logits[0, :-1].float()
        total += F.cross_entropy(logits_tv, x_t[1:], reduction="sum").item()
        count += len(x_t) - 1
    return total / max(count, 1)


@torch.inference_mode()
def matches(draft: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> Tensor:
    """(len(answer),) bool: the draft's greedy token equals the answer's token, given all before it."""
    x_t = torch.tensor([prompt + answer], device=draft.device)
    drafted_t: Tensor = draft(input_ids=x_t, use_cache=False).logits[0].argmax(-1)
    match_n: Tensor = drafted_t[len(prompt) - 1 : -1] == x_t[0, len(prompt) :]
    return match_n.cpu()


def agreement(match_n: list[Tensor]) -> dict[int, float]:
    """Share of positions from which the next k drafted tokens all match, for every k of DEPTHS that fits before the
    answer's end.
    """
    result = {}
    for k in DEPTHS:
        runs = [m.unfold(0, k, 1).all(-1) for m in match_n if len(m) >= k]
        result[k] = torch.cat(runs).float().mean().item() if runs else 0.0
    return result


def target_answers(
    target: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    answers = []
    for group in batches([Prompt(source="", ids=ids) for ids in prompts], 64):
        written = continue_batch(target, group, temperature=0.0, new_tokens=new_tokens)
        answers += [(prompt.ids, answer) for prompt, answer in zip(group, written, strict=True)]
    return answers


def evaluate(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """One row a prompt set: loss of target and draft on the published text, agreement by depth on the target's
    answers.
    """
    device = pick_device(options.device)
    tokenizer, target = load_tokenizer(options.target), load_model(options.target, device)
    draft = load_model(options.draft, device) if options.draft else None
    texts = corpus_texts(options.corpus) if options.corpus else evaluation_texts(options.data, options.cache)
    report: dict[str, dict[str, object]] = {}
    for name, pairs in texts.items():
        chosen = pairs[: options.rows]
        prompts = [ids[: options.longest] for ids in encode(tokenizer, [prompt for prompt, _ in chosen])]
        whole = encode(tokenizer, [prompt + answer for prompt, answer in chosen])
        row: dict[str, object] = {"texts": len(chosen), "target_loss": round(heldout_loss(target, whole), 4)}
        if draft is not None:
            row["draft_loss"] = round(heldout_loss(draft, whole), 4)
            answers = target_answers(target, prompts, options.new_tokens)
            depths = agreement([matches(draft, prompt, answer) for prompt, answer in answers])
            row |= {"tokens": sum(len(a) for _, a in answers), "agreement": {k: round(v, 4) for k, v in depths.items()}}
        report[name] = row
        print(f"{name:12} {row}", flush=True)
    return report


def corpus_texts(corpus: Path) -> dict[str, list[tuple[str, str]]]:
    """Held-out documents by source, as (prompt, answer); plain text is continued from its first 200 characters."""
    texts: dict[str, list[tuple[str, str]]] = {}
    for document in read_documents(corpus):
        if document.heldout:
            mark = "\n<|assistant|>\n"
            head, found, rest = document.text.partition(mark)
            pair = (head + mark, rest) if found else (document.text[:200], document.text[200:])
            texts.setdefault(document.source, []).append(pair)
    return texts


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "target", "data", "cache")
    parser.add_argument("--draft", type=Path, help="a draft's folder, to be measured against the target")
    parser.add_argument("--corpus", type=Path, help="measure on this corpus folder's held-out documents instead")
    parser.add_argument("--rows", type=int, default=100, help="texts of each set (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the table there")
    add_flags(parser, "device", longest=512, new_tokens=128)
    options = parser.parse_args(arguments)
    report = evaluate(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
