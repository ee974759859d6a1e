"""Aligning a plain denoiser to the target that it will draft for: DEER's two stages.

Reads a training state of train.py, answers of the target. Writes OUT/state.safetensors, from which write.py makes a
folder for method "deer" (option separator_token_id: SEPARATOR).

Stage one, continuation: an answer of the target is cut at a random place, a separator stands there, and the masked
cross-entropy of `plain_loss` is learned on what follows. Stage two, refinement: all of the last R ~ U{1..most} slots
are masked, and the i-th of them counts BASE^(R - i): the tokens right behind the text, where verification begins, count
most.

Source: DEER: Draft with Diffusion, Verify with Autoregressive Models (arXiv:2512.15176). BASE is 1.01 as far as is
known. Ours: the refinement's weights are divided by their sum, so that the loss is in nats a slot whatever R is; end
tokens fill what an answer leaves free, as they fill a canvas.

    python -m recipes.bundled_diffusion.deer answers --corpus build/corpus --out build/answers.jsonl
    python -m recipes.bundled_diffusion.deer train build/plain/state.safetensors \\
        --answers build/answers.jsonl --out build/deer
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from paceline.training import Progress, groups, keep, update
from recipes.bundled_diffusion.lessons import Lesson, batch_of, documents, read_rows
from recipes.bundled_diffusion.losses import Batch, plain_loss
from recipes.bundled_diffusion.model import EOS, MAX_LENGTH, TOKENIZER, Net, read_net
from recipes.bundled_diffusion.run import set_up
from recipes.common.options import add_flags, new_parser

SEPARATOR, ASSISTANT = 0, 2  # <|endoftext|> and <|assistant|> of the bundled target's tokenizer
BASE, MOST = 1.01, 96


def continuation(lesson: Lesson, cut: int, slots: int) -> tuple[Lesson, int]:
    """A lesson cut before answer token `cut`, the separator there, with the slots to fill behind it; for `batch_of`."""
    return Lesson([*lesson.prompt, *lesson.answer[:cut], SEPARATOR], lesson.answer[cut : cut + slots]), slots


def batches(lessons: Sequence[Lesson], *, size: int, most: int, seed: int) -> Iterator[Batch]:
    """Endless batches of random lessons, each cut anywhere, with 1..`most` slots behind the cut."""
    rng = random.Random(seed)
    while True:
        chosen = [rng.choice(lessons) for _ in range(size)]
        yield batch_of([continuation(one, rng.randrange(len(one.answer)), rng.randint(1, most)) for one in chosen])


def suffix_weights(batch: Batch, base: float = BASE) -> Tensor:
    """(b, n) BASE^(R - i) at the i-th of the R slots to fill, i from 1; 0 elsewhere."""
    exponent = (batch.length[:, None] - 1 - batch.slots).clamp(min=0)
    return torch.where(batch.answer, base ** exponent.double(), 0.0).float()


def refinement_loss(net: Net, batch: Batch, base: float = BASE) -> Tensor:
    """Nats a slot, weighed: all slots behind the separator are masked."""
    masked = batch.answer
    noisy = batch.ids.masked_fill(masked, net.spec.mask_token_id)
    losses = F.cross_entropy(net(noisy, batch.slots, batch.seen, masked).float(), batch.ids[masked], reduction="none")
    weight = suffix_weights(batch, base)[masked]
    return (losses * weight).sum() / weight.sum()


def continuation_loss(net: Net, batch: Batch, generator: torch.Generator) -> Tensor:
    """Nats a slot, an upper bound in expectation: a uniform number of the slots behind the separator is masked."""
    return plain_loss(net, batch, generator)


def read_answers(path: Path, most: int) -> list[Lesson]:
    """Prompts and answers, one JSON object a line, as far as they fit a canvas with `most` slots behind any cut.

    Raises SystemExit where there are none.
    """
    found = [Lesson(row["prompt"], row["answer"]) for row in read_rows(path) if row["answer"]]
    found = [one for one in found if len(one.prompt) + len(one.answer) + most < MAX_LENGTH]
    if not found:
        raise SystemExit(
            f"no answers in {path}: run `python -m recipes.bundled_diffusion.deer answers --out {path}` first"
        )
    return found


def answers(options: argparse.Namespace) -> None:
    """Let the bundled target answer the questions of the corpus, greedily."""
    from paceline import LLM, SamplingParams

    texts = documents(options.corpus, Tokenizer.from_file(str(TOKENIZER)), heldout=False)
    prompts = [ids[: ids.index(ASSISTANT) + 1] for ids in texts if ASSISTANT in ids][: options.count]
    llm = LLM(**({} if options.model is None else {"model": options.model}))
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for prompt, out in zip(prompts, found, strict=True):
            ids = list(out.outputs[0].token_ids)
            ends = out.outputs[0].finish_reason == "stop" and ids[-1:] != [EOS]
            file.write(json.dumps({"prompt": prompt, "answer": [*ids, EOS] if ends else ids}) + "\n")


def train(options: argparse.Namespace) -> list[float]:
    """Both stages; the loss of every step."""
    set_up(options)
    net, lessons = read_net(options.state), read_answers(options.answers, options.slots)
    generator, history = torch.Generator().manual_seed(options.seed), list[float]()
    optimizer = torch.optim.AdamW(groups(net, 0.05), lr=options.rate, betas=(0.9, 0.98))
    made = batches(lessons, size=options.batch, most=options.slots, seed=options.seed)
    for step in range(options.first_steps + options.second_steps):
        with torch.autocast("cpu", torch.bfloat16):
            first = step < options.first_steps
            loss = (
                continuation_loss(net, next(made), generator)
                if first
                else refinement_loss(net, next(made), options.base)
            )
        update(net, optimizer, loss)
        history.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}  stage {'one' if first else 'two'}  loss {loss.item():.3f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    keep(options.out / "state.safetensors", net, optimizer, Progress(step=len(history)))
    return history


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    asking = verbs.add_parser("answers", help="let the target answer")
    add_flags(asking, "corpus", "out")
    asking.add_argument("--model", help="the target; the bundled one where it is left out")
    asking.add_argument("--count", type=int, default=4000, help="questions (%(default)s)")
    asking.add_argument("--tokens", type=int, default=128, help="most tokens of an answer (%(default)s)")
    learning = verbs.add_parser("train", help="both stages")
    learning.add_argument("state", type=Path, help="state.safetensors of a plain denoiser, or its folder")
    add_flags(learning, "answers", "out", "threads", "seed", batch=32)
    learning.add_argument("--rate", type=float, default=5e-4, help="learning rate, the same in all steps (%(default)s)")
    learning.add_argument("--first-steps", type=int, default=1500, help="of the continuation (%(default)s)")
    learning.add_argument("--second-steps", type=int, default=1500, help="of the refinement (%(default)s)")
    learning.add_argument("--slots", type=int, default=MOST, help="most slots behind a cut (%(default)s)")
    learning.add_argument("--base", type=float, default=BASE, help="of the refinement's weights (%(default)s)")
    options = parser.parse_args(arguments)
    if options.verb == "answers":
        answers(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
