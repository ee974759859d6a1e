"""Models with mixers as targets and as draft models: chains and trees change no token, and keep the distribution of
what is sampled; draft models read only what the text confirms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from tiny_checkpoint import write as write_llama
from tiny_hybrid import KINDS, hybrid, write
from tiny_llama import runner_of, tiny_llama
from tiny_llama import tokens as drawn
from tools.gtest import ERROR, g_test

from paceline import LLM, registry
from paceline.assembly import build_parts
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.drafters import DrafterArgs
from paceline.engine import Engine, EngineDriver, Request, Turns
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import DecodingSequence
from paceline.errors import CapabilityError, UnsupportedModelError
from paceline.models.runners import GroupedRunner, RecurrentRunner
from paceline.models.state.recurrent import RecurrentPart
from paceline.search import SearchConfig, SearchDriver, SearchRequest

PROMPTS = [drawn(size, seed=size) for size in (3, 20, 37)]
LENGTH = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
NOISE = 0.15

Made = tuple[str, dict[str, Any]]
CREWS: dict[str, tuple[Sequence[Made], int]] = {
    "chains": ([("draft_model", {})], 4),
    "trees": ([("draft_model", {"tree_width": 3})], 9),
    "dyspec": ([("draft_model", {"tree_policy": "dyspec"})], 6),
    "eagle2": ([("draft_model", {"tree_policy": "eagle2", "tree_width": 3})], 8),
    "ngram": ([("ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 2})], 3),
    "suffix": ([("suffix", {})], 4),
    "ngram and trees": (
        [("ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 2}), ("draft_model", {"tree_width": 2})],
        6,
    ),
}


def drafting(target: RecurrentRunner, crew: str, draft: RecurrentRunner | None = None, **sizes: Any) -> Engine:
    made, nodes = CREWS[crew]
    drafters = []
    for index, (name, options) in enumerate(made):
        args = DrafterArgs(
            vocab_size=target.info.vocab_size, index=index, max_context=target.info.max_context, target=target,
            load_runner=lambda name: draft,  # type: ignore[arg-type, return-value]  # given where it is asked for
        )  # fmt: skip
        more = {"model": "draft"} if name == "draft_model" else {}
        drafters.append(registry.load("drafters", name)(args, **options, **more))
    return engine(target, drafters, nodes, **sizes)  # type: ignore[arg-type]


def alone(kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[list[int]]]:
    """What plain decoding says."""
    return tokens(run(engine(hybrid(kind)), prompts, params))  # type: ignore[arg-type]


@cache
def plain(kind: str) -> list[list[list[int]]]:
    """What it says to PROMPTS at temperature 0."""
    return alone(kind, PROMPTS, GREEDY)


BY_KIND = ("chains", "trees")


@pytest.mark.parametrize(
    ("kind", "crew", "compiled"),
    [
        *product(KINDS, BY_KIND, [True]),
        *(("mamba2", crew, True) for crew in CREWS if crew not in BY_KIND),
        *((kind, "trees", False) for kind in KINDS),
    ],
)
def test_drafts_change_no_token(kind: str, crew: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(self: RecurrentPart, length: int) -> None:
        raise AssertionError("a state was taken back")

    monkeypatch.setattr(RecurrentPart, "truncate", backwards)
    draft = hybrid(kind, noise=NOISE, compiled=compiled)
    found = run(drafting(hybrid(kind, compiled=compiled), crew, draft), PROMPTS, GREEDY)
    assert tokens(found) == plain(kind)
    assert not any(request.metrics.dropped_drafters for request in found)
    accepted = [request.metrics.num_accepted_tokens for request in found]
    assert sum(accepted) > 0
    assert all(count < LENGTH for count in accepted)
    assert draft.memory.used == 0


def test_the_comparison_catches_a_state_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("mamba2")
    _commit_all(monkeypatch)
    found = run(drafting(hybrid(), "chains", hybrid(noise=NOISE)), PROMPTS, GREEDY)
    assert tokens(found) != wanted


def test_another_model_may_draft() -> None:
    """A draft model of another kind, whose drafts are nearly never right."""
    found = run(drafting(hybrid("delta"), "trees", hybrid("convolution", seed=3)), PROMPTS, GREEDY)
    assert tokens(found) == plain("delta")
    assert not any(request.metrics.dropped_drafters for request in found)


@pytest.mark.parametrize("crew", ["chains", "trees"])
def test_outputs_of_a_request_part_from_one_state(crew: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, n=2, ignore_eos=True, seed=5)
    draft = hybrid(noise=NOISE)
    found = run(drafting(hybrid(), crew, draft), PROMPTS, params)
    assert tokens(found) == alone("mamba2", PROMPTS, params), (
        "drafts of seeded requests are points: the draws are the same"
    )
    assert all(one.outputs[0].token_ids != one.outputs[1].token_ids for one in found)
    assert sum(request.metrics.num_accepted_tokens for request in found) > 0
    assert draft.memory.used == 0


@pytest.mark.parametrize("crew", ["chains", "trees"])
def test_sequences_that_make_way_come_back(crew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paused, pause = list[int](), Scheduler.pause

    def noting(self: Scheduler, sequence: DecodingSequence) -> None:
        paused.append(sequence.key)
        pause(self, sequence)

    monkeypatch.setattr(Scheduler, "pause", noting)
    target = hybrid("convolution", cache_slots=32)
    size, prompts = 15 * target.memory.block_bytes, [drawn(40, seed=seed) for seed in range(3)]
    live = drafting(target, crew, hybrid("convolution", noise=NOISE), kv_cache_memory_bytes=size, max_num_seqs=3)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    assert tokens(run(live, prompts, long)) == alone("convolution", prompts, long)
    assert paused
    assert target.native.arena.nbytes <= size


def test_a_request_is_cancelled_between_its_drafts() -> None:
    target, draft = hybrid(), hybrid(noise=NOISE)
    live = drafting(target, "trees", draft)
    requests = [Request(f"c{i}", None, list(ids), GREEDY, 7, LENGTH) for i, ids in enumerate(PROMPTS)]
    for request in requests:
        live.add(request)
    for _ in range(3):
        live.step()
    live.abort("c1")
    while live.has_work:
        live.step()
    wanted = plain("mamba2")
    assert [requests[i].outputs[0].token_ids for i in (0, 2)] == [wanted[0][0], wanted[2][0]]
    kept = requests[1].outputs[0].token_ids
    assert 0 < len(kept) < LENGTH
    assert kept == wanted[1][0][: len(kept)]
    assert draft.memory.used == 0


def test_a_draft_is_cut_short_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = hybrid(), hybrid(noise=NOISE)
    live, score, calls = drafting(target, "trees", draft), draft.score, list[int]()

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return score(*args, **options)

    monkeypatch.setattr(draft, "score", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(live, PROMPTS, GREEDY)
    live.fail_started(stopped.value)
    assert not live.has_work
    assert tokens(run(live, PROMPTS, GREEDY)) == plain("mamba2")
    assert draft.memory.used == 0


@pytest.mark.parametrize("draft_of", ["hybrid", "attention"])
def test_methods_that_take_tokens_back_are_rejected_by_name(draft_of: str) -> None:
    target, draft = hybrid(), hybrid(noise=NOISE)
    model = draft if draft_of == "hybrid" else runner_of(tiny_llama())

    def built(method: str) -> Any:
        return build_parts(target, SpeculativeConfig(method=method, model="tiny"), load=lambda name: model)  # type: ignore[arg-type, return-value]

    assert built("draft_model")
    assert built("auto")
    if draft_of == "hybrid":
        with pytest.raises(CapabilityError, match="'pearl' needs a model that can take back tokens that it has read"):
            built("pearl")
    else:
        assert built("pearl"), "the control: attention alone can"


def test_a_target_of_swift_must_take_tokens_back() -> None:
    def built(target: Any) -> Any:
        return build_parts(
            target, SpeculativeConfig(method="swift", options={"skip_ratio": 0.5}), load=lambda name: target
        )

    with pytest.raises(CapabilityError, match="'swift' needs a model that can take back tokens that it has read"):
        built(hybrid())
    assert built(runner_of(tiny_llama())), "the control: attention alone can"


def test_layers_with_mixers_run_in_no_groups() -> None:
    runner = hybrid()
    layers = (*runner.spec.layers, runner.spec.layers[0])
    with pytest.raises(UnsupportedModelError, match="cannot run in groups, since they keep states of the text"):
        GroupedRunner(
            replace(runner.spec, layers=layers), {}, 2, name="tiny", device=runner.info.device, dtype=runner.info.dtype
        )


def test_who_takes_tokens_back_says_so() -> None:
    follow = {name for name in registry.DRAFTERS if not registry.load("drafters", name).takes_back}
    assert follow == {"draft_model", "encdec_draft", "pard", "quantized_copy"}


def test_searches_which_take_tokens_back_are_rejected() -> None:
    request = SearchRequest("a", None, PROMPTS[0], GREEDY, 7, LENGTH, search=SearchConfig.parse("beam").open())

    def search(runner: Any) -> None:
        turns = Turns()
        SearchDriver(EngineDriver(engine(runner), turns), turns, models=None).run([request])  # type: ignore[arg-type]

    with pytest.raises(CapabilityError, match="search needs a model that can take back tokens that it has read; tiny"):
        search(hybrid())
    search(runner_of(tiny_llama()))
    assert len(request.outputs[0].token_ids) == LENGTH, "the control: attention alone can"


VOCAB, STEPS = 6, 3
TEXT = [1, 2, 1, 2, 3, 1, 2]


def _p_value(crew: str, outputs: int = 480) -> float:
    """Of a G-test of sampled outputs against the products of the target's rows."""
    target = hybrid(vocab=VOCAB)
    params = SamplingParams(temperature=0.9, max_tokens=STEPS, n=32, ignore_eos=True)
    live = drafting(target, crew, hybrid(vocab=VOCAB, noise=0.4))
    requests = run(live, [TEXT] * (outputs // 32), params, seed=1000)
    assert not any(request.metrics.dropped_drafters for request in requests)
    assert sum(request.metrics.num_accepted_tokens for request in requests) > outputs / 10
    counts = Counter(tuple(output.token_ids) for request in requests for output in request.outputs)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(STEPS):
        chances = {
            (*path, token): chance * float(row[token]) for path, chance in chances.items()
            for row in [_row(target, [*TEXT, *path])] for token in range(VOCAB)
        }  # fmt: skip
    return g_test([counts[key] for key in chances], list(chances.values()))


def _row(runner: RecurrentRunner, text: list[int]) -> torch.Tensor:
    cache = runner.open()
    row = (runner.extend([cache], [text]).logits[0].double() / 0.9).softmax(-1)
    runner.release(cache)
    return row


@pytest.mark.parametrize("crew", ["chains", "trees"])
def test_samples_follow_the_target(crew: str) -> None:
    assert _p_value(crew) > ERROR


def test_the_test_of_samples_catches_a_state_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    _commit_all(monkeypatch)
    assert _p_value("chains") < ERROR


def _commit_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """States hold what was drafted, accepted or not."""
    commit = RecurrentPart.commit

    def wrong(self: RecurrentPart, path: Sequence[int]) -> None:
        length = self.length + 1 + len(path)
        commit(self, range(self.scored - 1))
        self.length = length

    monkeypatch.setattr(RecurrentPart, "commit", wrong)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_grammars_and_trees(folder: Path, method: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs={"json": SCHEMA})
    prompts = ["Say something.", "Name a size."]
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 4, "controller": "fixed"}
    config |= {} if method == "auto" else {"tree_width": 3}

    def decoded(config: Any) -> list[Any]:
        llm = LLM(str(folder), speculative_config=config, threads=1)
        return llm.generate(prompts, params)

    found, wanted = decoded(config), decoded(None)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    assert all(one.metrics.num_accepted_tokens > 0 for one in found)
    assert all('"name"' in one.outputs[0].text for one in found)


def test_the_small_model_of_a_hierarchy_must_take_tokens_back(folder: Path, tmp_path: Path) -> None:
    target = str(write_llama(tmp_path))

    def opened(small: str) -> LLM:
        config = {"method": "specmquant", "model": small, "quantization": "int8"}
        return LLM(target, speculative_config=config, threads=1, profile=False)

    with pytest.raises(CapabilityError, match="small model of 'specmquant' must be one that can take back tokens"):
        opened(str(folder))
    assert opened(target), "the control: attention alone can"
