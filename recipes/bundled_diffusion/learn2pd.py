"""Learn2PD's filter: a small network that says from the confidences of a block which predictions are final already.

Reads a plain model, which stays as it is, and prompts of the tasks. Writes OUT/filter.safetensors, for method
"learn2pd" (option `filter`); OUT/records.safetensors, OUT/state.safetensors and OUT/facts.json (how good it is
on trajectories it has not seen).

Static decoding, a slot a round, gives the final text y*. Then the canvas is filled again, "extremely greedily": each
step writes exactly those slots of the block whose prediction equals y*; where the block's predictions are the same as
in the step before, y* is written instead (it would go on for ever). Each step gives one example: the confidences of all
slots of the block, written ones included, and whether each prediction equals y*. The filter has two layers and learns
by binary cross-entropy on all its outputs.

Source: Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable Parallel Decoding
(arXiv:2509.25188): AdamW at 3e-3 on all examples at once, shares 80 / 10 / 10. Ours: whole trajectories are dealt to
the shares, so that no text is in two of them, and the weights of the lowest loss on the second share are kept. The
hidden width is not published; 32 gives about as many parameters as the paper names.

    python -m recipes.bundled_diffusion.learn2pd --out build/learn2pd
    python -m recipes.bundled_diffusion.evaluate src/paceline/bundled/diffusion --length 16 \\
        --method '{"method": "learn2pd", "filter": "build/learn2pd/filter.safetensors", "filter_threshold": 0.9}'
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from lab.diffusion import items
from paceline.diffusion.commit import BlockFilter
from paceline.models import Call, Denoiser, Ints
from paceline.training import keep, take_up
from recipes.bundled_diffusion.answering import Batched, encoded, fill
from recipes.bundled_diffusion.model import TOKENIZER, read_net
from recipes.common.options import add_flags, new_parser

TOGETHER = 64
"""Prompts that are decoded side by side, and kept as soon as they are done."""


@dataclass(frozen=True, slots=True)
class Records:
    """Examples: confidences (k, b), whether each prediction is final (k, b), and the trajectory that each is of
    (k,).
    """

    confidence: Tensor
    final: Tensor
    trajectory: Tensor

    def take(self, chosen: Tensor) -> Records:
        """Some of them."""
        return Records(self.confidence[chosen], self.final[chosen], self.trajectory[chosen])

    def shares(self, seed: int = 0) -> tuple[Records, Records, Records]:
        """80, 10 and 10 % of the trajectories."""
        known = self.trajectory.unique()
        order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
        parts = order.tensor_split([int(0.8 * len(order)), int(0.9 * len(order))])
        train, valid, test = (self.take(torch.isin(self.trajectory, part)) for part in parts)
        return train, valid, test


@dataclass(slots=True)
class Replay:
    """One canvas that is filled again, knowing how it will end."""

    tokens: Ints
    final: Ints
    start: int
    block_length: int
    mask: int
    before: Ints | None = None
    rows: list[tuple[NDArray[np.float64], NDArray[np.bool_]]] = field(default_factory=list)

    @property
    def block(self) -> slice:
        """The leftmost block with a masked slot."""
        first = int((self.tokens == self.mask).argmax()) - self.start
        low = self.start + first // self.block_length * self.block_length
        return slice(low, low + self.block_length)

    def learn(self, logits: Tensor) -> None:
        """One step: note confidences and labels of the block, then write what is final."""
        here = self.block
        sure, best = logits[here].double().softmax(-1).max(-1)
        predicted, wanted = best.numpy(), self.final[here]
        right = predicted == wanted
        self.rows.append((sure.numpy(), right))
        again = self.before is not None and bool((predicted == self.before).all())
        self.before = None if again else predicted
        self.tokens[here] = (
            wanted if again else np.where(right & (self.tokens[here] == self.mask), wanted, self.tokens[here])
        )
        if not (self.tokens[here] == self.mask).any():
            self.before = None  # the next block has predictions of its own


def replayed(denoiser: Denoiser, finals: Sequence[Ints], starts: Sequence[int], block_length: int) -> list[Replay]:
    """Fill canvases again whose end is known; the denoiser gives logits of every slot."""
    mask = denoiser.mask_token_id
    replays = [
        Replay(np.append(f[:s], [mask] * (f.size - s)), f, s, block_length, mask)
        for f, s in zip(finals, starts, strict=True)
    ]
    while live := [one for one in replays if (one.tokens == mask).any()]:
        calls = [Call(one.tokens.copy(), np.arange(one.tokens.size)) for one in live]
        for one, logits in zip(live, denoiser.forward(calls), strict=True):
            one.learn(logits)
    return replays


def recorded(replays: Sequence[Replay], first: int = 0) -> Records:
    """What replays noted; trajectories are counted from `first`."""
    rows = [(sure, right, first + i) for i, one in enumerate(replays) for sure, right in one.rows]
    confidence, final = (torch.from_numpy(np.stack(part)) for part in ([r[0] for r in rows], [r[1] for r in rows]))
    return Records(confidence.float(), final.float(), torch.tensor([row[2] for row in rows]))


def collect(options: argparse.Namespace) -> Records:
    """Trajectories of the model on its prompts; what OUT holds already is not made again."""
    path = options.out / "records.safetensors"
    net, tokenizer = read_net(options.model), Tokenizer.from_file(str(TOKENIZER))
    asked = [
        item for task in options.tasks for item in items(task, split="train", count=options.prompts, seed=options.seed)
    ]
    prompts = encoded(tokenizer, [item.prompt for item in asked])
    records = Records(**load_file(path)) if path.is_file() else None
    done = 0 if records is None else int(records.trajectory.max()) + 1
    for low in range(done, len(prompts), TOGETHER):
        some = prompts[low : low + TOGETHER]
        static = {"method": "static", "block_length": options.block_length}
        finals = [outcome.canvas.tokens for outcome in fill(Batched(net), some, static, length=options.length)]
        replays = replayed(Batched(net), finals, [len(ids) for ids in some], options.block_length)
        made = recorded(replays, low)
        pairs = [made] if records is None else [records, made]
        names = ("confidence", "final", "trajectory")
        records = Records(*(torch.cat([getattr(part, name) for part in pairs]) for name in names))
        save_file({name: getattr(records, name) for name in names}, path)
        print(f"{low + len(some)} of {len(prompts)} trajectories, {len(records.final)} examples", flush=True)
    assert records is not None
    return records


class Mlp(nn.Module):
    """The filter while it learns; names as `paceline.diffusion.commit.learned.NAMES`."""

    def __init__(self, block_length: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(block_length, hidden), nn.Linear(hidden, block_length)

    def forward(self, confidence: Tensor) -> Tensor:
        """Logits (k, b)."""
        logits: Tensor = self.fc2(self.fc1(confidence).relu())
        return logits

    def filter(self) -> BlockFilter:
        """What decodes."""
        parts = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        first, bias, second, last = (part.detach().double().numpy().copy() for part in parts)
        return BlockFilter((first, bias, second, last))


def loss_of(filter_: BlockFilter, records: Records) -> float:
    """Binary cross-entropy, nats an output."""
    logits = torch.from_numpy(filter_.logits(records.confidence.double().numpy()))
    return F.binary_cross_entropy_with_logits(logits, records.final.double()).item()


def calibration(filter_: Any, records: Records, bins: int = 10) -> list[dict[str, float]]:
    """Of each bin of the filter's output: examples, mean output, share of predictions that are final; empty bins are
    left out.
    """
    said = 1 / (1 + np.exp(-filter_.logits(records.confidence.double().numpy()).ravel()))
    true, at = records.final.numpy().ravel(), np.minimum((said * bins).astype(int), bins - 1)
    found = [(k, at == k) for k in range(bins) if (at == k).any()]
    return [
        {"low": k / bins, "count": int(own.sum()), "mean": float(said[own].mean()), "observed": float(true[own].mean())}
        for k, own in found
    ]


def false_positives(filter_: BlockFilter, records: Records, threshold: float) -> float:
    """Of the predictions that the filter accepts at a threshold, the share that is not final."""
    said = 1 / (1 + np.exp(-filter_.logits(records.confidence.double().numpy())))
    accepted = said > threshold
    return float(1 - records.final.numpy()[accepted].mean()) if accepted.any() else 0.0


def fit(records: Records, options: argparse.Namespace) -> BlockFilter:
    """Learn on the first share; the weights of the lowest loss on the second."""
    train, valid, _ = records.shares(options.seed)
    torch.manual_seed(options.seed)
    mlp = Mlp(train.confidence.shape[1], options.hidden)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=options.rate)
    progress = take_up(options.out / "state.safetensors", mlp, optimizer)
    best, path = float("inf"), options.out / "filter.safetensors"
    if progress.step and path.is_file():
        best = loss_of(BlockFilter.load(path), valid)
    last = False
    while not last and progress.step < options.epochs:
        started = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(mlp(train.confidence), train.final)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.minutes += (time.perf_counter() - started) / 60
        last = progress.step >= options.epochs or progress.minutes >= options.minutes
        if last or progress.step % options.every == 0:
            if (now := loss_of(mlp.filter(), valid)) < best:
                best = now
                mlp.filter().save(path)
            keep(options.out / "state.safetensors", mlp, optimizer, progress)
            print(
                f"epoch {progress.step}  loss {loss.item():.4f}  held out {now:.4f}  {progress.minutes:.1f} min",
                flush=True,
            )
    return BlockFilter.load(path)


def make(options: argparse.Namespace) -> dict[str, Any]:
    """Collect, learn, say how good the filter is on the third share."""
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    records = collect(options)
    filter_ = fit(records, options)
    *_, test = records.shares(options.seed)
    facts = {
        "examples": len(records.final),
        "parameters": sum(int(part.size) for part in filter_.weights),
        "final": round(float(test.final.mean()), 4),
        "loss": round(loss_of(filter_, test), 4),
        "false_positives": {tau: round(false_positives(filter_, test, tau), 4) for tau in (0.5, 0.7, 0.9, 0.96)},
        "calibration": [{name: round(value, 4) for name, value in row.items()} for row in calibration(filter_, test)],
    }
    (options.out / "facts.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts), flush=True)
    return facts


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "model", "out", "tasks")
    parser.add_argument("--prompts", type=int, default=200, help="of each task (%(default)s)")
    add_flags(parser, length=16)
    parser.add_argument(
        "--block-length", type=int, default=16, help="slots of a block, for which the filter is made (%(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=32, help="width of the filter (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10_000, help="passes over all examples (%(default)s)")
    parser.add_argument(
        "--every", type=int, default=100, help="epochs between looks at the held-out loss (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=8, help="minutes to learn for at most (%(default)s)")
    add_flags(parser, "threads", "seed", rate=3e-3)
    make(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
