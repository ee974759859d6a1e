"""A served drafter learns from requests: versions come and go between requests, and never show in tokens."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from acceptance_heads import acceptance_head
from forked import FORKING
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams, registry
from paceline.bench import BUNDLED_DRAFT, bundled_prompts
from paceline.checkpoints import read_config
from paceline.config import LearnConfig, options_of
from paceline.drafters.learning import LearningDrafter, LearningStatus, learning_drafter, trainer_process
from paceline.drafters.learning.records import TrafficBuffer, TrafficRecord
from paceline.drafters.learning.versions import Outcomes, TenantVersions, Version, outcome
from paceline.errors import ConfigError
from paceline.models.heads import HeadConfig, read_head, write_head
from paceline.tree import TokenTree, Verdict

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
QUICK = {"interval": 4, "steps": 16, "held_out": 2, "learning_rate": 2e-3, "pause": "never", "rollback": False}
FIXED = {"controller": "fixed", "num_speculative_tokens": 3}
PROMPTS = [one.prompt for one in bundled_prompts()[:4]]
PATIENCE = 60.0
PLAIN: Any = None
"""A drafter that is not asked."""


class Counted(NamedTuple):
    texts: list[tuple[int, ...]]
    drafted: int
    accepted: int


def asked(llm: LLM, tenant: str | None = None, prompts: list[str] = PROMPTS) -> Counted:
    """Each prompt alone, so that drafts do not depend on a batch."""
    each = [llm.generate({"prompt": one} | ({"cache_salt": tenant} if tenant else {}), GREEDY) for one in prompts]
    metrics = [out.metrics for (out,) in each]
    assert not any(one.dropped_drafters for one in metrics)
    texts = [tuple(out.outputs[0].token_ids) for (out,) in each]
    return Counted(texts, sum(one.num_draft_tokens for one in metrics), sum(one.num_accepted_tokens for one in metrics))


def drafter_of(llm: LLM) -> LearningDrafter:
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, LearningDrafter)
    return drafter


def status(llm: LLM) -> LearningStatus:
    (found,) = llm.engine.parts.drafter_set.learning()
    return found


def waited(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)


@pytest.fixture(autouse=True, scope="module")
def _forking() -> Iterator[None]:
    """Trainers are forked; one is started as it is for users, in the test of heads that it does not know."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer_process, "subprocess", FORKING)
        yield


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Counted:
    return asked(llm.with_speculative_config(None))


def medusa(llm: LLM, scale: float) -> str:
    """Heads that add so much noise to what predicts the next token."""
    info = llm.runner.info
    config = HeadConfig(method="medusa", hidden_size=info.hidden_size, vocab_size=info.vocab_size,
                        draft_vocab_size=info.vocab_size, num_heads=3)  # fmt: skip
    return written_head(config, head_weights(config, scale=scale))


def learning(llm: LLM, head: str, **learn: Any) -> LLM:
    return llm.with_speculative_config({"method": "medusa", "model": head, **FIXED, "learn": QUICK | learn})


@pytest.fixture(scope="module")
def taught(llm: LLM) -> Iterator[LLM]:
    """Heads that learn; what they have learned when a test begins depends on those before it."""
    with learning(llm, medusa(llm, 0.3)) as found:
        yield found


def test_it_learns_from_one_tenant_alone_and_tokens_stay(taught: LLM, plain: Counted) -> None:
    before = asked(taught, "mine")
    for _ in range(12):
        waited(lambda: not drafter_of(taught).learner.busy)
        if status(taught).version:
            break
        asked(taught, "mine")
    after, other = asked(taught, "mine"), asked(taught, "other")
    assert before.texts == after.texts == other.texts == plain.texts
    assert after.accepted > before.accepted + 10, "what was learned is drafted"
    assert (other.drafted, other.accepted) == (before.drafted, before.accepted), "other tenants have the base"
    drafter = drafter_of(taught)
    assert drafter.status(lambda tenant: tenant == "other").version == 0
    assert drafter.status(lambda tenant: tenant == "mine").version > 0
    assert drafter.status(lambda tenant: tenant == "other").requests == len(PROMPTS)
    assert re.search(r"version \d+, learned from requests \(\d+ rounds", drafter.note)


class Idle:
    """In the place of the trainer's process, where a test needs none."""

    pid = 0

    def __init__(self, *_: object) -> None:
        """It starts nothing."""

    def pause(self, paused: bool) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture(params=["draft_model", "medusa"])
def steady(request: pytest.FixtureRequest, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A drafter whose versions change as a test wants alone."""
    monkeypatch.setattr(learning_drafter, "TrainerProcess", Idle)
    own = {"method": "draft_model"} if request.param == "draft_model" else {"method": "medusa", "model": medusa(llm, 0)}
    with llm.with_speculative_config({**own, **FIXED, "learn": {"interval": 10**6}}) as found:
        yield found


def poison(llm: LLM, folder: Path) -> Path:
    """The same kind of drafter, whose drafts are hardly ever right."""
    generator = torch.Generator().manual_seed(1)
    if llm.engine.parts.drafter_set.names == ["draft_model"]:
        copied(BUNDLED_DRAFT, folder, lambda weights: {"lm_head.weight": weights["lm_head.weight"].flip(0)})
        return folder
    config, weights = read_head(medusa(llm, 0.0), llm.runner.info)
    blocks = {name: one for name, one in weights.items() if "blocks" in name}
    noise = {name: 30 * torch.randn(one.shape, generator=generator) for name, one in blocks.items()}
    return write_head(folder, config, weights | noise)


def copied(source: Path, folder: Path, change: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    """A checkpoint with some of its weights changed."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    changed = weights | {name: one.contiguous() for name, one in change(weights).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("steady", ["draft_model"], indirect=True)
def test_a_poisoned_version_is_taken_back_and_tokens_stay(
    steady: LLM, plain: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = drafter_of(steady).learner
    good, versions = asked(steady), learner.of("")
    bad = learner.adopt("", poison(steady, tmp_path / "poison"))
    assert versions.current is bad
    with caplog.at_level(logging.WARNING):
        poisoned = asked(steady)
        poisoned = asked(steady) if not bad.withdrawn else poisoned
    assert bad.withdrawn
    assert (versions.current.number, versions.rolled_back) == (0, 1)
    assert "version 1 is taken back" in caplog.text
    assert poisoned.texts == plain.texts
    assert asked(steady) == good, "the base drafts again"


def test_without_the_comparison_a_poisoned_version_stays(
    llm: LLM, plain: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(learning_drafter, "TrainerProcess", Idle)
    learn = {"interval": 10**6, "rollback": False}
    with llm.with_speculative_config({"method": "draft_model", **FIXED, "learn": learn}) as other:
        good, learner = asked(other), drafter_of(other).learner
        learner.adopt("", poison(other, tmp_path / "poison"))
        poisoned = asked(other)
        assert learner.of("").current.number == 1
    assert poisoned.accepted < good.accepted / 4
    assert poisoned.texts == plain.texts


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_request_that_runs_keeps_its_version_until_that_is_taken_back(
    steady: LLM, plain: Counted, tmp_path: Path, withdrawn: bool
) -> None:
    stream = steady.stream(PROMPTS[0], GREEDY)
    tokens = [*next(stream).token_ids]
    (state,) = [state for sequence in steady.engine.scheduler.running for state in sequence.states]
    version = state.version
    drafter_of(steady).learner.adopt("", poison(steady, tmp_path / "poison"))
    version.withdrawn = withdrawn
    tokens += next(stream).token_ids
    assert (state.version is version) is not withdrawn
    assert not version.withdrawn or state.version.number == 1
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(tokens) == plain.texts[0]


def test_a_killed_trainer_harms_nothing_and_is_told_of_once(
    taught: LLM, plain: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    learner = drafter_of(taught).learner
    waited(lambda: not learner.busy)
    os.kill(learner.pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        found = [asked(taught, "after").texts]
        waited(lambda: not status(taught).running)
        found += [asked(taught, "after").texts for _ in range(2)]
    assert found == [plain.texts] * 3
    told = [one.getMessage() for one in caplog.records if "learns no more" in one.getMessage()]
    assert len(told) == 1
    assert "signal 9" in told[0]
    assert re.search(r"the server goes on with version \d+ \(said once\)", told[0])
    assert "its trainer has ended" in drafter_of(taught).note


def test_a_draft_model_learns_and_the_trainer_goes_with_the_model(llm: LLM, plain: Counted, tmp_path: Path) -> None:
    """A draft whose last layer was spoilt, so that there is something to learn in a few steps."""
    kept = set(Path(tempfile.gettempdir()).glob("paceline-learn-*"))
    folder, name = tmp_path / "draft", "model.norm.weight"
    copied(BUNDLED_DRAFT, folder, lambda one: {name: one[name] * torch.linspace(0.1, 3.0, len(one[name]))})
    spec = {"method": "draft_model", "model": str(folder), **FIXED, "learn": QUICK | {"pause": "always"}}
    with llm.with_speculative_config(spec) as taught:
        before = asked(taught)
        for _ in range(8):
            waited(lambda: not drafter_of(taught).learner.busy)
            if status(taught).version:
                break
            asked(taught)
        after, pid = asked(taught), drafter_of(taught).learner.pid
        assert before.texts == after.texts == plain.texts
        assert after.accepted > before.accepted
        os.kill(pid, 0)
        assert set(Path(tempfile.gettempdir()).glob("paceline-learn-*")) > kept
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert set(Path(tempfile.gettempdir()).glob("paceline-learn-*")) <= kept


def test_a_draft_model_with_an_acceptance_head_learns(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller that reads the head is told of it by the drafter that learns; no trainer is started."""
    monkeypatch.setattr(learning_drafter, "TrainerProcess", Idle)
    head = str(acceptance_head(hidden=read_config(BUNDLED_DRAFT)["hidden_size"]).write(tmp_path / "head"))
    spec = {"method": "draft_model", "model": str(BUNDLED_DRAFT), "acceptance_head": head, "learn": QUICK}
    with llm.with_speculative_config(spec) as taught:
        assert taught.engine.parts.controller.name == "specdec_pp"
        assert drafter_of(taught).foretells


def test_the_buffer_is_bounded_and_keeps_tenants_apart() -> None:
    def record(size: int) -> TrafficRecord:
        one = TrafficRecord(range(size), 0, 2, torch.zeros(size - 1, 4), 1000)
        one.close()
        return one

    each = record(10).bytes
    buffer = TrafficBuffer(5 * each)
    for _ in range(3):
        buffer.add("a", record(10))
    for _ in range(40):
        buffer.add("b", record(10))
        assert buffer.bytes <= 5 * each
        assert buffer.bytes == sum(one.bytes for tenant in "ab" for one in buffer.of(tenant))
    assert len(buffer.of("a")) == 2, "who asks most gives way first"
    newest = buffer.of("b")[-1]
    chosen, held = buffer.parts("b", 4, 1)
    assert held == [newest]
    assert len(chosen) == 4
    assert newest not in chosen
    assert not {*map(id, chosen)} & {*map(id, buffer.of("a"))}
    buffer.forget("b")
    assert buffer.bytes == 2 * each
    assert buffer.parts("b", 4, 1) == ([], [])


def test_a_record_keeps_its_states_in_step_and_begins_anew_behind_a_gap() -> None:
    text = [1, 2, 3, 4]
    record = TrafficRecord(text, 2, 3, torch.zeros(1, 1), 6)
    text += [5, 6]
    assert record.grow(text, 2, torch.tensor([[3.0], [4.0]]))
    record.reject(torch.tensor([0.0, 5.0, 3.0]), 2)
    found = record.tensors()
    assert found["tokens"].tolist() == [3, 4, 5, 6]
    assert (found["at"].tolist(), found["ids"].tolist(), found["logits"].tolist()) == ([3], [[1, 2]], [[5.0, 3.0]])
    assert found["states"].flatten().tolist() == [0.0, 3.0, 4.0]
    text += [7, 8]  # 7 was not told
    assert record.grow(text, 1, torch.tensor([[7.0]]))
    assert record.tokens == [7, 8]
    assert not record.at
    for token in range(9, 13):
        text.append(token)
        assert record.grow(text, 1, torch.tensor([[float(token)]])) is (token < 13)
    assert not record.grow([*text, 13], 1, torch.zeros(1, 1)), "it is full"


def test_trials_are_counted_where_the_drafter_had_a_token() -> None:
    tree = TokenTree.chain([4, 5, 6], source=1)
    assert outcome(tree, Verdict((0, 1), (4, 5), 9), 1) == (3, 2, True)
    assert outcome(tree, Verdict((0, 1, 2), (4, 5, 6), 9), 1) == (3, 3, False)
    assert outcome(tree, Verdict((), (), 9), 1) == (1, 0, True)
    assert outcome(tree, Verdict((0,), (4,), 9), 0) == (0, 0, False), "of another drafter"


def version(number: int) -> Version:
    return Version(number, Path(str(number)), PLAIN, Outcomes())


def test_versions_are_compared_on_requests_of_the_same_kinds() -> None:
    """A new version is taken back where the one before it is better, and not where requests have become harder."""
    for worse in (False, True):
        versions = TenantVersions(version(0), rollback=True)
        versions.count(versions.base, 1000, 800)  # of easier requests
        versions.adopt(version(1))
        took, chosen = False, []
        for _ in range(20):
            one = versions.choose()
            chosen.append(one.number)
            took = took or versions.count(one, 40, 4 if worse and one.number else 16)
        assert took is worse
        assert versions.current.number == 1 - worse
        assert chosen[:4] == [1, 0, 1, 0]
        assert versions.before is None
        assert len({*chosen[-2:]}) == 1, "who was found better has all requests"
        assert Outcomes(80, 32).below(Outcomes(1000, 800)), "the control: what was before is no measure"


def test_chance_alone_takes_no_version_back() -> None:
    assert not Outcomes(100, 45).below(Outcomes(1000, 500))
    assert Outcomes(100, 20).below(Outcomes(1000, 500))
    assert not Outcomes(10, 0).below(Outcomes(1000, 500)), "too few trials"
    assert not Outcomes(100, 60).below(Outcomes(1000, 500))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"method": "ngram", "learn": True}, "ngram cannot learn from requests; drafters that can are draft_model"),
        ({"method": ["ngram", "suffix"], "learn": True}, "ngram and suffix cannot learn"),
        ({"method": "draft_model", "learn": 3}, "learn must be True, False or a dict"),
        ({"method": "draft_model", "learn": {"interval": 0}}, "interval"),
        ({"method": "draft_model", "learn": {"pause": "often"}}, "pause"),
        ({"method": "draft_model", "learn": {"speed": 1}}, "speed"),
        ({"method": ["ngram", {"method": "draft_model", "learn": True}]}, "learn must be given beside the list"),
    ],
)  # fmt: skip
def test_what_cannot_learn_is_named(llm: LLM, config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        llm.with_speculative_config(config)


def test_strict_mode_rejects_what_would_change_tokens(llm: LLM) -> None:
    config = {"method": "draft_model", "draft_sample_method": "probabilistic", "learn": True}
    with pytest.raises(ConfigError, match="learn must be left out in strict mode"):
        LLM(dtype="float32", exactness="strict", speculative_config=config)


def test_heads_that_the_trainer_does_not_know_are_rejected_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "subprocess", subprocess)
    info = llm.runner.info
    config = HeadConfig(method="medusa", hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=64,
                        num_heads=1)  # fmt: skip
    own = {"heads.0.head.weight": torch.zeros(64, info.hidden_size)}
    head = written_head(config, head_weights(config) | own)
    with pytest.raises(ConfigError, match=r"learn must be left out: medusa cannot be trained .*heads\.0\.head\.weight"):
        learning(llm, head)


def test_its_settings_are_in_the_text_of_the_page() -> None:
    rows = [f"| `{name}` | {option.doc} |" for name, option in options_of(LearnConfig).items()]
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text(encoding="utf-8")
    assert rows == re.findall(r"^\| `[a-z_]+` \| .* \|$", page, re.MULTILINE)


def test_methods_that_learn_have_a_trainer_and_are_named_on_the_page() -> None:
    learners = {name: registry.load("drafters", name).learns for name in registry.DRAFTERS}
    can = {name for name, trainer in learners.items() if trainer}
    assert {learners[name] for name in can} <= registry.TRAINERS.keys()
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text(encoding="utf-8")
    told = re.search(r"a draft model, or a head of ((?:.|\n)*?)\.\n", page)
    assert told is not None
    assert can == {"draft_model", *re.findall(r"`([^`]+)`", told[1])}


def test_nothing_learns_unless_it_is_asked_for(llm: LLM) -> None:
    for config in ({"method": "draft_model"}, {"method": "draft_model", "learn": False}):
        drafters = llm.with_speculative_config(config).engine.parts.drafter_set
        assert not drafters.learning()
