"""A round of online learning: what is learned of rejected drafts, what the replay decides, what is written."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT, bundled_prompts
from paceline.checkpoints import open_checkpoint, read_config
from paceline.drafters.learning import receive, send
from paceline.errors import CheckpointError
from paceline.models.heads import HeadConfig
from paceline.training import Batch, NextTokenTrainer
from paceline.training.batches import RecordedBatch
from paceline.training.online import OnlineTraining, Served, Subject, batch_of, fit, replayed, served

SIZE = 12
LAYER = {"num_attention_heads": 4, "intermediate_size": 256, "max_position_embeddings": 2048}
GO_ON = Event()
GO_ON.set()


class Bigram(NextTokenTrainer):
    """Predicts each token from the one before it alone."""

    def __init__(self) -> None:
        super().__init__(torch.eye(SIZE), 2)
        self.table = nn.Parameter(torch.zeros(SIZE, SIZE))

    def states(self, batch: Batch) -> Tensor:
        return self.table[batch.tokens]

    @classmethod
    def init(cls, *_: Any) -> Any:
        raise NotImplementedError

    def write(self, *_: Any) -> None:
        raise NotImplementedError


class ServedBigram(Served):
    def __init__(self) -> None:
        self.module, self.vocabulary = Bigram(), torch.arange(SIZE)

    def write(self, folder: Path) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


def subject_of(llm: LLM, trainer: str, rows: Tensor | None = None) -> Subject:
    return Subject(trainer, llm.runner.info, None, torch.empty(0) if rows is None else rows)


@cache
def traffic(llm: LLM, taps: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """Records of texts that the model wrote, in which every token stands in place of a draft."""
    texts = [one.prompt for one in bundled_prompts()[:6]]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    found = []
    for out in llm.with_speculative_config(None).generate(texts, params, use_tqdm=False):
        tokens = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        cache = llm.runner.open()
        last = llm.runner.info.num_layers
        scores = llm.runner.extend([cache], [tokens], taps=taps or (last,), all_logits=True)
        llm.runner.release(cache)
        at = torch.arange(len(out.prompt_token_ids) + 1, len(tokens))
        best = scores.logits[at - 1].topk(16)
        states = torch.cat([scores.taps[layer] for layer in taps or (last,)], 1)[:-1]
        record = {"tokens": torch.tensor(tokens), "at": at, "ids": best.indices, "logits": best.values}
        found.append(record | {"states": states, "embedded": llm.runner.embed(tokens)})
    return found


def firsts(records: list[dict[str, Tensor]]) -> list[int]:
    return [int(record["at"][0]) - 1 for record in records]


def job(folder: Path, records: list[dict[str, Tensor]], apart: int, **more: Any) -> tuple[dict[str, Any], Any]:
    """Learns the records, all but the last `apart`."""
    wanted = {"base": str(folder), "current": str(folder), "seed": 1}
    wanted |= {"learned": len(records) - apart, "replayed": apart}
    tensors = {f"{i}.{name}": one for i, record in enumerate(records) for name, one in record.items()}
    return wanted | {"first": firsts(records), "learning_rate": None} | more, tensors


def head_of(llm: LLM, method: Any) -> Path:
    """A head with random weights; Medusa's is close to what predicts the next token."""
    info, several = llm.runner.info, method not in ("eagle", "eagle3")
    stages = {"inner_size": info.hidden_size, "tie_weights": True, "scale_input": True}
    config = HeadConfig(
        method=method, hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=2048,
        num_heads=2 if several else 1, taps=(0, 1, 2) if method == "eagle3" else (),
        layer={} if several and method != "hydra++" else LAYER,
        **(stages if method == "mlp_speculator" else {}),
    )  # fmt: skip
    return Path(written_head(config, head_weights(config, scale=0.3)))


@pytest.mark.parametrize(("ids", "rate", "near"), [(SIZE, 0.3, True), (1, 0.3, False), (SIZE, 0.0, False)])
def test_a_bigram_draft_becomes_the_bigram_target(ids: int, rate: float, near: bool) -> None:
    """Forward KL converges to the target's conditionals; not where only its best token is kept, nor without a rate."""
    chances = (2 * torch.randn(SIZE, SIZE)).softmax(-1)
    tokens = torch.tensor([(5 * i * i + 3 * i) % SIZE for i in range(40)] + [i for i in range(SIZE) for _ in "ab"])
    at = torch.arange(1, len(tokens))
    best = chances[tokens[at - 1]].log().topk(ids)
    version = ServedBigram()
    info = Subject.of({"trainer": "", "target": facts()}, {}).target
    record = {"tokens": tokens, "at": at, "ids": best.indices, "logits": best.values}
    fit(version.module, [batch_of(version, info, record, 0, rejected=True)] * 80, rate, 0, GO_ON)
    seen = tokens[:-1].unique()
    off = (version.module.table.softmax(-1) - chances)[seen].abs().sum(-1).max() / 2
    assert bool(off < 0.05) is near, off


def facts() -> dict[str, Any]:
    sizes = {"hidden_size": SIZE, "vocab_size": SIZE, "num_layers": 1, "max_context": 64, "stored_rows": None}
    return sizes | {"dtype": "float32", "name": "toy", "family": "toy", "fingerprint": "toy"}


def test_targets_are_what_was_kept_within_the_vocabulary() -> None:
    version = ServedBigram()
    version.vocabulary = torch.tensor([1, 3, 5])
    info = Subject.of({"trainer": "", "target": facts()}, {}).target
    record = {
        "tokens": torch.tensor([0, 1, 3, 2, 5]), "at": torch.tensor([1, 2, 3]),
        "ids": torch.tensor([[1, 2], [3, 5], [2, 4]]), "logits": torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 0.0]]),
    }  # fmt: skip
    batch = batch_of(version, info, record, 1, rejected=True)
    assert batch.columns.tolist() == [[-1, 0, 1, -1, -1]]  # 2 has no column, 5 was no correction
    wanted = torch.tensor([[1.0, 0.0, 0.0], [0.0, *torch.tensor([3.0, 1.0]).softmax(0).tolist()]])
    assert isinstance(batch, RecordedBatch)
    assert torch.allclose(batch.chances, wanted)
    assert batch_of(version, info, record, 1, rejected=False).columns.tolist() == [[-1, 0, 1, -1, 2]]


METHODS = ["medusa", "hydra", "hydra++", "eagle", "eagle3", "mlp_speculator"]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_learns_is_written_and_drafts(llm: LLM, tmp_path: Path, method: str) -> None:
    """The same seam for each: the candidate is better in the replay, and is what its folder says."""
    folder = head_of(llm, method)
    taps = (0, 1, 2) if method == "eagle3" else ()
    records = traffic(llm, taps)
    rows = llm.runner.head(torch.eye(llm.runner.info.hidden_size), norm=False)[:, :2048].T.contiguous()
    training = OnlineTraining(subject_of(llm, method, rows), GO_ON)
    asked, tensors = job(folder, [*records[:4] * 4, *records[4:]], 2, output=str(tmp_path / "new"), learning_rate=2e-3)
    found = training.round(asked, tensors)
    assert found["best"] == "candidate", found
    assert found["tokens_a_pass"]["candidate"] > found["tokens_a_pass"]["current"] + 0.02
    again = served(subject_of(llm, method, rows), tmp_path / "new")
    held = [batch_of(again, llm.runner.info, one, first, rejected=False)
            for one, first in zip(records[4:], firsts(records[4:]), strict=True)]  # fmt: skip
    assert replayed(again.module, held) == pytest.approx(found["tokens_a_pass"]["candidate"])
    spec = {"method": method, "model": str(tmp_path / "new"), "controller": "fixed", "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (out,) = llm.with_speculative_config(spec).generate(bundled_prompts()[4].prompt, params)
    assert out.metrics.num_draft_tokens > 0
    assert not out.metrics.dropped_drafters


def test_a_draft_model_learns_layers_and_keeps_all_else(llm: LLM, tmp_path: Path) -> None:
    records = traffic(llm)
    training = OnlineTraining(subject_of(llm, "draft_model"), GO_ON)
    asked, tensors = job(
        BUNDLED_DRAFT, [*records[2:4] * 6, *records[2:4]], 2, output=str(tmp_path / "new"), learning_rate=1e-3
    )  # the same texts, so that something is learned in so few steps
    found = training.round(asked, tensors)
    assert found["best"] == "candidate", found
    before, after = (open_checkpoint(one, read_config(one)) for one in (BUNDLED_DRAFT, tmp_path / "new"))
    changed = {name for name in before.entries if not torch.equal(before.tensor(name), after.tensor(name))}
    assert changed == {name for name in before.entries if "layers" in name or name == "model.norm.weight"}


def test_nothing_is_learned_without_a_rate_and_nothing_worse_is_written(llm: LLM, tmp_path: Path) -> None:
    folder, records = head_of(llm, "medusa"), traffic(llm)[:4]
    rows = llm.runner.head(torch.eye(llm.runner.info.hidden_size), norm=False)[:, :2048].T.contiguous()
    training = OnlineTraining(subject_of(llm, "medusa", rows), GO_ON)
    frozen = training.round(*job(folder, records * 3, 2, output=str(tmp_path / "frozen"), learning_rate=0.0))
    assert frozen["best"] == "current"
    assert frozen["tokens_a_pass"]["candidate"] == frozen["tokens_a_pass"]["current"]
    better = training.round(*job(folder, records * 6, 2, output=str(tmp_path / "better"), learning_rate=2e-3))
    assert better["best"] == "candidate"
    torn = [*records[:2] * 5, *records[2:]]  # other texts than those of the replay
    worse = training.round(*job(tmp_path / "better", torn, 2, output=str(tmp_path / "worse"), learning_rate=1.0))
    assert worse["best"] == "current", worse
    assert worse["tokens_a_pass"]["candidate"] < worse["tokens_a_pass"]["current"]
    back = job(folder, records * 3, 2, output=str(tmp_path / "back"), learning_rate=0.0, base=str(tmp_path / "better"))
    assert training.round(*back)["best"] == "base"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["better"]


def test_a_pause_holds_a_step_back() -> None:
    may_go_on, version = Event(), ServedBigram()
    info = Subject.of({"trainer": "", "target": facts()}, {}).target
    record = {"tokens": torch.tensor([0, 1, 2]), "at": torch.tensor([1, 2]),
              "ids": torch.tensor([[1], [2]]), "logits": torch.zeros(2, 1)}  # fmt: skip
    ran: list[bool] = []
    timer = Timer(0.05, lambda: (ran.append(bool(version.module.table.any())), may_go_on.set()))  # type: ignore[func-returns-value]
    timer.start()
    fit(version.module, [batch_of(version, info, record, 0, rejected=True)], 0.1, 0, may_go_on)
    assert ran == [False]
    assert version.module.table.any()


def test_a_head_with_what_the_trainer_does_not_learn_is_named(llm: LLM) -> None:
    info = llm.runner.info
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": 64}
    config = HeadConfig(method="medusa", num_heads=2, **sizes)
    own = {f"heads.{k}.head.weight": torch.zeros(64, info.hidden_size) for k in range(2)}
    folder = written_head(config, head_weights(config) | own)
    with pytest.raises(CheckpointError, match=r"differs by heads\.0\.head\.weight"):
        served(subject_of(llm, "medusa", torch.zeros(64, info.hidden_size)), Path(folder))


def test_messages_are_read_as_they_were_sent() -> None:
    pipe = io.BytesIO()
    send(pipe, {"a": [1, "x"]}, {"t": torch.arange(3), "h": torch.ones(2, 2, dtype=torch.bfloat16)})
    send(pipe, {"paused": True})
    whole = pipe.getvalue()
    header, tensors = receive(pipe := io.BytesIO(whole))
    assert header == {"a": [1, "x"]}
    assert tensors["t"].tolist() == [0, 1, 2]
    assert tensors["h"].dtype is torch.bfloat16
    assert receive(pipe) == ({"paused": True}, {})
    with pytest.raises(EOFError):
        receive(io.BytesIO(whole[:20]))


def test_an_interrupt_of_the_terminal_does_not_end_the_process() -> None:
    command = [sys.executable, "-m", "paceline.training.online"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            send(process.stdin, {"name": "nothing"})
            assert "nothing cannot be trained" in receive(process.stdout)[0]["error"]
            process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.wait(60) == 0
