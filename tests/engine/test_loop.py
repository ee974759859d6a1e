"""The loop over the toy runner: drafts never change what comes out, failures stay where they happen, nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers import Outcome, Plan
from paceline.controllers.policies import FixedController
from paceline.drafters import Context, Drafter
from paceline.engine import Request, drafter_set, step_clock
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 1, 2, 3], [3, 3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 2.5, 4: -100.0}},
    "min_tokens": {"min_tokens": 9},
    "stop_token": {"stop_token_ids": [5, 6]},
    "ignore_eos": {"ignore_eos": True},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.02},
}


class Guess(Drafter):
    """A point drafter whose guesses are the toy target's own, some of them spoiled: a chain or a bushy tree."""

    name = "guess"

    def __init__(self, runner: ToyRunner, *, bushy: bool = False) -> None:
        self.runner, self.bushy = runner, bushy

    def begin(self, contexts: list[Context]) -> list[Context]:
        return list(contexts)

    def propose(self, states: list[Context], budgets: list[Budget], so_far: list[TokenTree]) -> list[TokenTree]:
        return [self._one(context.tokens, budget) for context, budget in zip(states, budgets, strict=True)]

    def _one(self, text: list[int], budget: Budget) -> TokenTree:
        size, nodes, parents, at, path = self.runner.info.vocab_size, [], [], -1, list(text)
        for _ in range(min(budget.depth, budget.nodes)):
            best = int(self.runner.logits(path).argmax())
            wanted = best if sum(path) % 4 else (best + 3) % size  # one guess in four is spoiled
            if self.bushy and len(nodes) + 2 <= budget.nodes:
                nodes.append((wanted + 1) % size)
                parents.append(at)
            nodes.append(wanted)
            parents.append(at)
            at = len(nodes) - 1
            path.append(wanted)
            if len(nodes) >= budget.nodes:
                break
        return TokenTree.build(nodes, parents) if nodes else EMPTY_TREE

    def fork(self, state: Context, context: Context) -> Context:
        return context


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bushy", [False, True])
def test_point_drafts_change_no_token(rules: dict[str, Any], temperature: float, bushy: bool) -> None:
    runner = ToyRunner(16, order=None)
    params = SamplingParams(temperature=temperature, max_tokens=24, **rules)
    plain = run(engine(runner), PROMPTS, params)
    fast = run(engine(runner, [Guess(runner, bushy=bushy)], 5), PROMPTS, params)
    assert tokens(plain) == tokens(fast)
    assert sum(r.metrics.num_accepted_tokens for r in fast) > 0
    assert [[o.finish_reason for o in r.outputs] for r in plain] == [[o.finish_reason for o in r.outputs] for r in fast]
    assert runner.open_caches == 0


def test_a_drafter_of_trees_is_left_out_where_chains_alone_are_scored() -> None:
    runner = ToyRunner(16, order=None, trees=False)
    found = run(engine(runner, [Guess(runner, bushy=True)], 5), PROMPTS, GREEDY)
    assert tokens(found) == tokens(run(engine(runner), PROMPTS, GREEDY))
    assert all("scores chains only" in request.metrics.dropped_drafters["guess"] for request in found)
    chains = run(engine(runner, [Guess(runner)], 5), PROMPTS, GREEDY)
    assert not any(request.metrics.dropped_drafters for request in chains), "the control: chains are scored"


def test_the_equality_catches_a_verifier_that_keeps_a_wrong_guess() -> None:
    class Credulous:
        name, reads_text = "credulous", False

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def verify_scores(self, trees: Any, scores: Any) -> Any:
            found = self.inner.verify_scores(trees, scores)
            pairs = zip(found, trees, strict=True)
            return [replace(v, path=(0,), accepted=(int(t.tokens[0]),)) if len(t) else v for v, t in pairs]

    runner = ToyRunner(16, order=None)
    wrong = engine(runner, [Guess(runner)], 5)
    wrong.parts.greedy = Credulous(wrong.parts.greedy)  # type: ignore[assignment]
    assert tokens(run(wrong, PROMPTS, GREEDY)) != tokens(run(engine(runner), PROMPTS, GREEDY))


SIZES = [{"max_num_seqs": 1}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 3, "max_num_batched_tokens": 2}]


@pytest.mark.parametrize("sizes", SIZES)
def test_batching_and_chunking_change_nothing(sizes: dict[str, int]) -> None:
    runner = ToyRunner(16, order=None)
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, logprobs=2, prompt_logprobs=2)
    base, other = run(engine(runner), PROMPTS, params), run(engine(runner, **sizes), PROMPTS, params)
    assert tokens(base) == tokens(other)
    for a, b in zip(base, other, strict=True):
        assert a.prompt_logprobs == b.prompt_logprobs
        assert len(a.prompt_logprobs or []) == len(a.prompt_ids)
        assert [o.logprobs for o in a.outputs] == [o.logprobs for o in b.outputs]
    assert runner.open_caches == 0


def test_outputs_of_one_request_differ_and_share_the_prompt() -> None:
    runner = ToyRunner(16)
    (request,) = run(
        engine(runner), [[1, 2, 3, 4, 5, 6]], SamplingParams(temperature=1.5, max_tokens=16, n=4, ignore_eos=True)
    )
    assert len({tuple(o.token_ids) for o in request.outputs}) == 4
    assert runner.fed < 6 + 4 * 16 + 1  # the prompt was fed once


def test_steps_are_counted_for_each_output() -> None:
    live, passes = engine(ToyRunner(16, order=2)), list[int]()
    live.watchers.append(lambda record: passes.append(len(record.sequences)))
    (request,) = run(live, PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=3))
    assert passes == [3] * 6
    assert request.metrics.num_steps == 18
    assert request.metrics.mean_acceptance_length == 1.0


def test_logprobs_are_the_models_own_under_drafts() -> None:
    runner = ToyRunner(16, order=None)
    params = SamplingParams(temperature=0.7, top_k=3, max_tokens=20, logprobs=3, ignore_eos=True, logit_bias={2: 5.0})
    plain, fast = run(engine(runner), PROMPTS, params), run(engine(runner, [Guess(runner)], 4), PROMPTS, params)
    for a, b in zip(plain, fast, strict=True):
        (x,), (y,) = a.outputs, b.outputs
        assert x.token_ids == y.token_ids
        assert x.logprobs is not None
        assert y.logprobs is not None
        assert len(y.logprobs) == len(y.token_ids)
        for one, two, token in zip(x.logprobs, y.logprobs, x.token_ids, strict=True):
            assert one.keys() == two.keys()
            assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-5)
        assert x.cumulative_logprob == pytest.approx(y.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kept_logits_are_those_behind_each_token(temperature: float) -> None:
    runner = ToyRunner()
    params = replace(GREEDY, temperature=temperature, ignore_eos=True)
    request = Request("kept", None, [1, 2, 3], params, 7, 24, kept_logits=[])
    one = engine(runner, [Guess(runner, bushy=True)], 4)
    one.add(request)
    while one.has_work:
        one.step()
    output, kept = request.outputs[0].token_ids, request.kept_logits
    assert kept is not None
    assert len(kept) < len(output) > 4, "some steps bring several tokens"
    wanted = torch.stack([runner.logits([1, 2, 3, *output[:count]]) for count in range(len(output))])
    assert torch.equal(torch.cat(kept), wanted)
    assert run(one, [[1, 2, 3]], params)[0].kept_logits is None


def test_nan_logits_end_one_request_and_keep_what_it_had() -> None:
    runner = ToyRunner(16, nan_from=20)
    short, long = run(
        engine(runner), [[1, 2, 3], [5] * 12], SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
    )
    assert short.outputs[0].finish_reason == "length"
    assert long.outputs[0].finish_reason == "error"
    assert "nan" in (long.outputs[0].error or "").lower()
    assert len(long.outputs[0].token_ids) > 3
    assert runner.open_caches == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_lose_no_token_before_nan_logits(temperature: float) -> None:
    runner = ToyRunner(16, order=None, nan_from=20)
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    plain, fast = run(engine(runner), PROMPTS, params), run(engine(runner, [Guess(runner)], 6), PROMPTS, params)
    assert tokens(fast) == tokens(plain)
    assert {o.finish_reason for request in fast for o in request.outputs} == {"error"}


def test_abort_keeps_what_was_produced_and_leaves_neighbours_alone() -> None:
    runner = ToyRunner(16, order=None)
    alone = tokens(run(engine(runner), [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
    live = engine(runner)
    from paceline.engine import Request

    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    kept, gone, waiting = (Request(name, None, [1, 2, 3], params, 7, 30) for name in ("kept", "gone", "waiting"))
    for request in (kept, gone):
        live.add(request)
    for _ in range(5):
        live.step()
    live.add(waiting)
    live.abort("gone")
    live.abort("waiting")
    while live.has_work:
        live.step()
    assert tokens([kept]) == alone
    assert gone.outputs[0].finish_reason == "abort"
    assert gone.outputs[0].token_ids == alone[0][0][:5]
    assert waiting.outputs[0].finish_reason == "abort"
    assert runner.open_caches == 0


@pytest.mark.parametrize("limit", ["max_tokens", "stop_token_ids"])
def test_tokens_cut_off_do_not_count_as_accepted(limit: str) -> None:
    runner = ToyRunner(16, order=None)
    text = runner.greedy([1, 2, 3], 9)
    ends: dict[str, Any] = {"max_tokens": 9} if limit == "max_tokens" else {"stop_token_ids": [text[4]]}

    class Knows(Guess):
        def _one(self, text: list[int], budget: Budget) -> TokenTree:
            return TokenTree.chain(self.runner.greedy(text, budget.depth))

    (request,) = run(engine(runner, [Knows(runner)], 9), [[1, 2, 3]], replace(GREEDY, ignore_eos=True, **ends))
    kept, m = len(request.outputs[0].token_ids), request.metrics
    nodes = m.num_draft_tokens
    assert 0 < kept <= 9
    assert m.num_steps == 1
    assert nodes == m.drafters["guess"].num_draft_tokens == 8 if limit == "max_tokens" else nodes > kept
    kept = min(kept, nodes)
    assert (
        m.num_accepted_tokens == m.drafters["guess"].num_accepted_tokens == sum(m.num_accepted_tokens_per_pos) == kept
    )
    assert m.mean_acceptance_length == 1 + kept


def test_planning_and_measuring_are_part_of_the_generation_time() -> None:
    planned: list[float] = []

    class Slow(FixedController):
        def plan(self, signals: Any) -> Plan:
            start = perf_counter()
            if not planned:
                sleep(0.05)
            planned.append(perf_counter() - start)
            return super().plan(signals)

    (request,) = run(engine(ToyRunner(16), controller=Slow(0)), [[1, 2, 3]], replace(GREEDY, ignore_eos=True, n=2))
    m = request.metrics
    assert m.first_step_time is not None
    assert m.time_to_first_token is not None
    assert m.time_to_first_token >= m.first_step_time - m.arrival_time + planned[0]
    assert m.generation_time >= planned[0] >= 0.05


def test_counters_add_up() -> None:
    runner = ToyRunner(16, order=None)
    for request in run(engine(runner, [Guess(runner, bushy=True)], 5), PROMPTS, replace(GREEDY, ignore_eos=True)):
        m = request.metrics
        assert m.num_generation_tokens == 24
        assert m.num_accepted_tokens == sum(m.num_accepted_tokens_per_pos)
        assert m.drafters["guess"].num_draft_tokens == m.num_draft_tokens
        assert m.num_accepted_tokens + m.num_steps >= 24
        assert m.mean_acceptance_length == 1 + m.num_accepted_tokens / m.num_steps
        assert m.time_to_first_token is not None


@pytest.mark.parametrize("wrong", [False, True], ids=["", "negative control"])
def test_a_drafter_sees_the_scores_of_its_own_sequences_where_others_end(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sequences end at different steps; what is observed at the root is what the model says of the text."""
    runner, off = ToyRunner(16, order=None), list[bool]()

    class Sees(Guess):
        def observe(self, states: Any, trees: Any, verdicts: Any, scores: Any) -> None:
            for index, (context, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
                before = context.tokens[: len(context.tokens) - len(verdict.tokens)]
                own = scores.of(index)
                right = len(own) == 1 + len(tree) and torch.allclose(own[0], runner.logits(before))
                off.append(not right)

    if wrong:
        pick = Scores.pick
        monkeypatch.setattr(Scores, "pick", lambda self, indices: pick(self, range(len(indices))))
    each = [replace(GREEDY, ignore_eos=True, max_tokens=count) for count in (5, 24, 11, 17)]
    run(engine(runner, [Sees(runner)], 3), PROMPTS, each)
    assert len(off) > 20
    assert any(off) is wrong


def test_that_a_sequence_ends_is_not_charged_to_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs the same however the sequence was decoded; the engine's own times have it."""
    now, told = [0.0], list[float]()

    class Slow(Guess):
        def end(self, states: list[Context]) -> None:
            now[0] += 1000.0

    class Listens(FixedController):
        def observe(self, outcome: Outcome) -> None:
            told.append(outcome.times.other + outcome.times.verify + outcome.seconds)

    for module in (step_clock, drafter_set):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    runner = ToyRunner(16, order=None)
    live = engine(runner, [Slow(runner)], controller=Listens(3))
    run(live, PROMPTS, [replace(GREEDY, ignore_eos=True, max_tokens=count) for count in (5, 24, 11, 17)])
    assert set(told) == {0.0}
    assert live.times.commit == 4000.0
