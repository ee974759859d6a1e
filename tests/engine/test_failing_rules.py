"""What code of one request raises ends that request, with a message that names it, and no other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.worlds import PROMPT, VOCAB, engine, make, target, verifier
from engine.harness import engine as bare_engine
from engine.harness import run
from engine.test_steering import HeadToy, OneModel
from tiny_checkpoint import write
from toy_models import letters
from toys import ToyRunner

from paceline import LLM, AsyncLLM, SamplingParams, grammar
from paceline.config import EngineConfig
from paceline.engine import Engine, Request
from paceline.sampling import LogitRule, Rules
from paceline.sampling.steering import Steering
from paceline.tree import EMPTY_TREE, TokenTree

MISTAKE = "a mistake of a user's"
DRAFTERS: dict[str, dict[str, Any]] = {"ngram": {}, "draft_model": {"model": "toy", "tree_width": 3}, "grammar": {}}
BOUND = {"structured_outputs": {"regex": "x"}}


class Failing(LogitRule):
    """Allows everything, and raises in one method once so many tokens are committed."""

    name = "structured_outputs"
    needs_paths = True

    def __init__(self, method: str | None, since: int) -> None:
        self.method, self.since, self.seen = method, since, 0

    def _maybe(self, method: str, length: int) -> None:
        if method == self.method and length >= self.since:
            raise LookupError(MISTAKE)

    def apply(self, rows_rv: torch.Tensor, paths: Any, generated: Sequence[int]) -> None:
        for path in paths:
            self._maybe("apply", self.seen + len(path))

    def advance(self, tokens: Sequence[int]) -> None:
        self.seen += len(tokens)
        self._maybe("advance", self.seen)

    def fork(self) -> Failing:
        self._maybe("fork", self.seen)
        twin = Failing(self.method, self.since)
        twin.seen = self.seen
        return twin

    def allowed(self, path: Sequence[int]) -> int:
        self._maybe("allowed", self.seen)
        return len(path)

    def forced(self, most: int) -> list[tuple[int, float]]:
        self._maybe("forced", self.seen)
        return []


def constrained(monkeypatch: pytest.MonkeyPatch, method: str | None, since: int = 0) -> None:
    """Let `structured_outputs` be such a rule."""
    monkeypatch.setattr(grammar, "constraint", lambda *_: Failing(method, since))


def outputs(drafter: str | None, *each: SamplingParams) -> list[list[Any]]:
    """Of requests that are decoded together: tokens, reasons, errors of their outputs."""
    runner = target()
    drafters = [] if drafter is None else [make(drafter, DRAFTERS[drafter], runner)]
    live = engine(drafters, verifier("rejection_sampler"), runner=runner)
    found = run(live, [PROMPT] * len(each), each, [7] * len(each))
    assert runner.open_caches == 0
    return [[(o.token_ids, o.finish_reason, o.error) for o in request.outputs] for request in found]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "logit_bias": {0: -100.0}, **more})


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize(("method", "since"), [("apply", 0), ("apply", 5), ("advance", 1), ("advance", 5)])
def test_a_rule_that_raises_ends_its_request(
    method: str, since: int, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded = {"temperature": 0.8, "seed": 3}
    (alone,), (drawn,) = outputs(drafter, greedy()), outputs(drafter, greedy(**seeded))
    constrained(monkeypatch, method, since)
    first, failing, last = outputs(drafter, greedy(), greedy(**BOUND), greedy(**seeded))
    assert (first, last) == (alone, drawn)
    ((tokens, reason, error),) = failing
    assert (reason, error) == ("error", f"structured_outputs failed (LookupError: {MISTAKE})")
    assert tokens == alone[0][0][: len(tokens)]
    assert len(tokens) == since or (method == "advance" and drafter is not None and len(tokens) > since)
    constrained(monkeypatch, None)
    assert outputs(drafter, greedy(**BOUND)) == [alone], "a rule that raises nowhere changes nothing"


def test_a_rule_that_cannot_be_forked_ends_the_output_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = outputs(None, greedy(n=2))
    constrained(monkeypatch, "fork")
    healthy, failing = outputs(None, greedy(n=2), greedy(n=2, **BOUND))
    assert healthy == alone
    assert failing == [alone[0], ([], "error", f"structured_outputs failed (LookupError: {MISTAKE})")]


@pytest.mark.parametrize(("method", "drafter"), [("allowed", "ngram"), ("forced", "grammar")])
def test_a_rule_that_fails_at_drafts_alone_costs_the_drafts(
    method: str, drafter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain decoding asks for neither, so that the text is the same."""
    (alone,) = outputs(None, greedy())
    constrained(monkeypatch, method, 2)
    assert outputs(drafter, greedy(**BOUND), greedy()) == [alone, alone]
    assert f"structured_outputs failed (LookupError: {MISTAKE})" in caplog.text


def test_a_row_that_a_rule_fails_on_is_the_only_one() -> None:
    """Rows beside it are bit for bit what they are alone; a draft cannot go on there, a text ends."""
    params = SamplingParams(temperature=0.7, top_k=3, logit_bias={2: 1.5})
    logits = torch.randn(4, VOCAB)

    class Picky(LogitRule):
        needs_paths = True

        def apply(self, rows_rv: torch.Tensor, paths: Any, generated: Sequence[int]) -> None:
            rows_rv *= 2.0
            if [5, 4] in [list(path) for path in paths]:
                raise LookupError(MISTAKE)

    def rules() -> Rules:
        return Rules(params, vocab_size=VOCAB, prompt=(), constraint=Picky())

    made, tree = rules(), TokenTree.build([5, 6, 4], [-1, -1, 0])
    found = made.apply(logits, tree)
    assert found[3].isnan().all()
    assert made.failure is None
    for row in range(3):
        assert torch.equal(found[row], rules().row(logits[row : row + 1], tree, row))
    assert torch.equal(made.apply_paths(logits[:2], [[5, 4], [6]])[0], torch.full((VOCAB,), -math.inf))
    made.advance([5, 4])
    assert made.apply(logits[:1], EMPTY_TREE).isfinite().any()
    made.rewind(2)
    assert torch.equal(made.apply(logits[:1], EMPTY_TREE), rules().apply(logits[:1], EMPTY_TREE))


# ------------------------------------------------------------------------------------------------ what is to blame


def filling(value: float) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def careless(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, value) if len(output) >= 3 else logits

    return careless


def careful(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + 1.0


CARELESS = "logits processor filling.<locals>.careless"
BLAMED: list[tuple[dict[str, Any], str]] = [
    ({"logits_processors": [filling(math.nan), careful]}, f"{CARELESS} made NaN of the model's logits"),
    ({"logits_processors": [careful, filling(math.inf)]}, f"{CARELESS} made infinity of the model's logits"),
    ({"logits_processors": [careful, filling(-math.inf)]}, f"no token is allowed: {CARELESS} leaves none"),
    ({"allowed_token_ids": [3], "bad_words": ["c"]}, "no token is allowed: bad_words leaves none"),
    ({"steering": {"method": f"{__name__}:Nothing"}}, "steering method 'nothing' made NaN of the model's logits"),
]


class Nothing(Steering):
    """Makes NaN of everything."""

    name = "nothing"

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        return rows_rv * math.nan


@pytest.mark.parametrize("drafter", [None, "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("wrong", "message"), BLAMED, ids=[f"{i}-{next(iter(wrong))}" for i, (wrong, _) in enumerate(BLAMED)]
)
def test_the_message_names_what_took_the_distribution(
    wrong: dict[str, Any], message: str, temperature: float, drafter: str | None
) -> None:
    ((_, reason, error),), _ = outputs(drafter, greedy(temperature=temperature, **wrong), greedy())
    assert reason == "error"
    assert error.startswith(message)
    assert "checkpoint" not in error


def test_the_temperature_is_named_that_makes_too_large_numbers_of_finite_ones() -> None:
    def huge(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 3e38

    cold, warm = outputs(None, *(greedy(temperature=t, logits_processors=[huge]) for t in (0.5, 1.0)))
    assert cold == [([], "error", "temperature 0.5 made infinity of the model's logits, which are finite; correct it")]
    assert warm[0][2] is None


def test_the_model_is_blamed_for_its_own_numbers() -> None:
    given = greedy(logits_processors=[careful], repetition_penalty=1.5, steering={"method": f"{__name__}:Nothing"})
    for params in (given, greedy(), greedy(logits_processors=[careful])):
        (request,) = run(bare_engine(ToyRunner(VOCAB, nan_from=4)), [[1, 2, 3, 4]], params)
        assert request.outputs[0].error.startswith("the model returned NaN among its logits; check the checkpoint")


def test_a_second_model_is_blamed_for_its_own_numbers() -> None:
    contrast = {"method": "contrastive", "model": "toy", "beta": 0.5}
    ((_, _, error),), _ = steered(HeadToy(VOCAB, nan_from=2), [[1, 2]] * 2, [contrast, None], drafted=False)
    assert error.startswith("steering method 'contrastive' got NaN from a second model or a layer")


# ------------------------------------------------------------------------------------------------ companions


class Breaks(HeadToy):
    """A second model that raises in one operation as soon as a sequence in it is `most` tokens long."""

    operation, most = "", 0

    def _broken(self, operation: str, lengths: Iterable[int]) -> None:
        if operation == self.operation and max(lengths) >= self.most:
            raise RuntimeError(MISTAKE)

    def extend(self, caches: Any, tokens: Any, **more: Any) -> Any:
        self._broken("extend", [cache.length + len(own) for cache, own in zip(caches, tokens, strict=True)])
        return super().extend(caches, tokens, **more)

    def score(self, caches: Any, roots: Any, trees: Any, **more: Any) -> Any:
        self._broken("score", [cache.length for cache in caches])
        return super().score(caches, roots, trees, **more)

    def commit(self, caches: Any, paths: Any) -> None:
        self._broken("commit", [cache.length for cache in caches])
        super().commit(caches, paths)


def steered(
    second: ToyRunner, prompts: Sequence[Sequence[int]], steering: Sequence[Any], drafted: bool, **more: Any
) -> list[list[Any]]:
    runner = HeadToy(VOCAB, order=2, sharpness=1.0)
    drafters = [make("draft_model", DRAFTERS["draft_model"], runner)] if drafted else []
    made = bare_engine(runner, drafters, 6 if drafted else 0)
    live = Engine(made.parts, EngineConfig(), eos_ids=(0,), models=OneModel(second))  # type: ignore[arg-type]
    found = run(live, prompts, [greedy(steering=one, **more) for one in steering])
    assert runner.open_caches == second.open_caches == 0
    return [[(o.token_ids, o.finish_reason, o.error) for o in request.outputs] for request in found]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(("operation", "since"), [("extend", 0), ("score", 0), ("score", 5), ("commit", 5)])
def test_a_companion_that_raises_ends_its_request(operation: str, since: int, drafted: bool) -> None:
    """The same second model serves another request, whose sequence stays short."""
    contrast = {"method": "contrastive", "model": "toy", "beta": 0.5}
    long, short = [1, 2, 3, 4] * 8, [1, 2]
    prompts, kinds = [long, short, long, short], [contrast, contrast, None, None]
    fine = [steered(HeadToy(VOCAB, order=2, seed=8), [p], [k], drafted)[0] for p, k in zip(prompts, kinds, strict=True)]
    second = Breaks(VOCAB, order=2, seed=8)
    assert steered(second, prompts, kinds, drafted) == fine
    second.operation, second.most = operation, len(long) - 1 + since
    ((tokens, reason, error),), *others = steered(second, prompts, kinds, drafted)
    if operation == "commit":  # of all sequences at once, so that none of them can go on
        ((_, *beside),), *others = others
        assert beside == [reason, error]
        assert others == fine[2:]
    else:
        assert others == fine[1:]
    assert (reason, error) == ("error", f"steering method 'contrastive' failed (RuntimeError: {MISTAKE})")
    assert tokens == fine[0][0][0][: len(tokens)]
    assert since <= len(tokens) < 12


def test_a_companion_that_cannot_be_forked_is_asked_for_each_output() -> None:
    contrast = {"method": "contrastive", "model": "toy", "beta": 0.5}
    second = Breaks(VOCAB, order=2, seed=8)
    second.operation = "extend"
    failing, (plain, *_) = steered(second, [[1, 2, 3]] * 2, [contrast, None], drafted=False, n=2)
    assert [error for *_, error in failing] == [f"steering method 'contrastive' failed (RuntimeError: {MISTAKE})"] * 2
    assert plain[1:] == ("length", None)


# ------------------------------------------------------------------------------------------------ text


class Unreadable:
    """A tokenizer that cannot decode one token."""

    def __init__(self, token: int) -> None:
        self.inner, self.token = letters(), token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.token in ids:
            raise ValueError(MISTAKE)
        return self.inner.decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "more"),
    [([1, 2, 9], {}), ([1, 2], {"stop": ["x"]}), ([1, 2], {}), ([1, 9, 2], {"prompt_logprobs": 1}),
     ([1, 2], {"logprobs": 2, "detokenize": False})],
    ids=["prompt", "stop", "end", "prompt_logprobs", "logprobs"],
)  # fmt: skip
def test_a_text_that_the_tokenizer_cannot_read_ends_its_request(prompt: list[int], more: dict[str, Any]) -> None:
    biased = {"logit_bias": {0: -100.0, 9: 60.0}, **more}
    healthy = greedy(bad_words=["i"])
    (alone,) = run(_reading(letters()), [[4, 5]], healthy)
    failing, fine = run(_reading(Unreadable(9)), [prompt, [4, 5]], [greedy(**biased), healthy], [7, 7])
    assert failing.outputs[0].finish_reason == "error"
    assert failing.outputs[0].error == f"the text could not be made: the tokenizer failed (ValueError: {MISTAKE})"
    assert (fine.outputs[0].text, fine.outputs[0].token_ids) == (alone.outputs[0].text, alone.outputs[0].token_ids)
    assert fine.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("unreadable", [9, None], ids=["unreadable", "control"])
def test_a_token_whose_name_cannot_be_made_is_in_the_stream_as_in_the_output(unreadable: int | None) -> None:
    """Token 9, which the third step brings; only its name, which logprobs show, is made."""
    params = greedy(logprobs=0, detokenize=False, logit_bias={0: -100.0, 9: 60.0}, logits_processors=[third])
    live = _reading(letters() if unreadable is None else Unreadable(unreadable))
    request = Request("r", None, [1, 2], params, 7, 8)
    live.add(request)
    chunks = [chunk for _ in iter(lambda: live.has_work, False) for chunk in live.step()]
    (output,) = request.outputs
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    assert len(output.logprobs or ()) == len(output.token_ids) == request.metrics.num_generation_tokens
    assert output.cumulative_logprob == sum(
        entry[token].logprob for entry, token in zip(output.logprobs or (), output.token_ids, strict=True)
    )
    assert [chunk.finish_reason for chunk in chunks][-1] == output.finish_reason
    wanted = ("error", 3) if unreadable is not None else ("length", 8)
    assert (output.finish_reason, len(output.token_ids), output.token_ids[2]) == (*wanted, 9)


def third(output: list[int], row: torch.Tensor) -> torch.Tensor:
    """Forbids token 9 before the third."""
    return row if len(output) >= 2 else row.index_fill(0, torch.tensor([9]), -math.inf)


def _reading(tokenizer: Any) -> Engine:
    made = bare_engine(ToyRunner(VOCAB, order=2))
    return Engine(made.parts, EngineConfig(), tokenizer=tokenizer, eos_ids=(0,))


def test_requests_end_even_where_their_text_cannot_be_made() -> None:
    """Cancelled, and after a step that raised."""
    for end in (lambda live: live.abort("one"), lambda live: live.fail_started(RuntimeError("cut short"))):
        live = _reading(Unreadable(9))
        (request,) = [_running(live)]
        end(live)
        assert request.finished
        assert not live.has_work
        assert request.outputs[0].token_ids


def _running(live: Engine) -> Any:
    from paceline.engine import Request

    request = Request("one", None, [1, 2], greedy(logit_bias={0: -100.0, 9: 60.0}), 7, 12, streamed=False)
    live.add(request)
    for _ in range(4):
        live.step()
    return request


# ------------------------------------------------------------------------------------------------ LLM and AsyncLLM


@cache
def tiny() -> LLM:
    from tempfile import mkdtemp

    return LLM(write(Path(mkdtemp(prefix="paceline-failing-"))), dtype="float32", threads=1, profile=False)


@pytest.mark.parametrize("method", ["apply", "advance"])
@pytest.mark.parametrize("since", [0, 4])
def test_streams_of_other_requests_go_on(method: str, since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, wrong = (
        SamplingParams(temperature=0.0, max_tokens=10),
        SamplingParams(temperature=0.0, max_tokens=10, **BOUND),
    )
    prompts = ["One day", "In the year"]
    alone = [one.outputs[0].token_ids for one in tiny().generate(prompts, fine)]
    constrained(monkeypatch, method, since)

    async def last(model: AsyncLLM, prompt: str, params: SamplingParams) -> Any:
        return [output async for output in model.generate(prompt, params)][-1].outputs[0]

    async def together() -> Any:
        model = AsyncLLM(tiny())
        each = await asyncio.gather(*(last(model, p, q) for p, q in zip(prompts, (fine, wrong), strict=True)))
        assert model.faults == 0
        return each

    def streamed() -> Any:
        healthy, failing = tiny().stream(prompts[0], fine), tiny().stream(prompts[1], wrong)
        first = next(healthy)
        return [[first, *healthy][-1].output.outputs[0], list(failing)[-1].output.outputs[0]]

    generated = [one.outputs[0] for one in tiny().generate(prompts, [fine, wrong])]
    for healthy, failing in (generated, asyncio.run(asyncio.wait_for(together(), 60)), streamed()):
        assert (healthy.token_ids, healthy.finish_reason) == (alone[0], "length")
        assert (failing.finish_reason, failing.error) == (
            "error",
            f"structured_outputs failed (LookupError: {MISTAKE})",
        )
        assert failing.token_ids == alone[1][: len(failing.token_ids)]
