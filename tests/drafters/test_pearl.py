"""PEARL: what a step brings, that no clock decides what is written, and that a draft which fails is dropped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT, bundled_prompts
from paceline.drafters import DraftedToken, DrafterArgs
from paceline.drafters.draft_model import pearl
from paceline.drafters.draft_model.pearl import STEPS, TURNS, OverlapChoice, OverlapChoices, PearlDrafter
from paceline.errors import CapabilityError, ConfigError, DrafterError

VOCAB = 7
PROMPT = [1, 2, 3, 4]
BATCH = [PROMPT, [5] * 9, [6, 1], [2, 2, 3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def prompts(bundled: LLM) -> list[Any]:
    return [
        {"prompt_token_ids": bundled.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::6][:4]
    ]


def models(noise: float = 0.7, **more: Any) -> tuple[ToyRunner, ToyRunner]:
    """A target, and a draft that has its distribution but for noise."""
    return ToyRunner(VOCAB, seed=3, sharpness=1.5), ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=noise, **more)


def drafter(target: Any, draft: Any, window: int | None = 4, **options: Any) -> PearlDrafter:
    args = DrafterArgs(vocab_size=VOCAB, index=0, max_context=4096, target=target, load_runner=lambda name: draft)
    return PearlDrafter(args, model="toy", num_speculative_tokens=window, **{"overlap": True} | options)


def decoded(
    target: Any, made: PearlDrafter | None, params: SamplingParams, prompts: Sequence[Sequence[int]] = BATCH
) -> Any:
    found = run(engine(target, [made] if made else [], 9, max_num_seqs=8), prompts, params)
    return tokens(found), [request.metrics.num_steps for request in found], [r.metrics.dropped_drafters for r in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", [1, 4])
def test_a_draft_that_is_the_target_brings_its_window_in_every_step(temperature: float, window: int) -> None:
    """(a), (c): it pre-verifies once; a draw stands with chance p / q = 1. Negative control: a noisy draft does not."""
    params = replace(GREEDY, temperature=temperature)
    for noise in (0.0, 0.7):
        target, draft = models(noise)
        texts, (steps,), _ = decoded(target, drafter(target, draft, window), params, [PROMPT])
        least = 1 + -(-40 // window)
        assert len(texts[0][0]) == 41
        assert (steps == least) == (noise == 0.0 or window == 1)


def test_it_scores_the_text_alone_while_it_drafts_the_first_window() -> None:
    target, draft = models(0.0)
    decoded(target, drafter(target, draft, 4), replace(GREEDY, max_tokens=9), [PROMPT])
    assert target.fed == len(PROMPT) - 1 + 1 + 4 + 4, "the prompt, pre-verify, and twice the root with three tokens"


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.9, seed=5)])
@pytest.mark.parametrize("overlap", [True, False, None])
def test_the_tokens_are_those_of_plain_decoding(params: SamplingParams, overlap: bool | None) -> None:
    target, draft = models()
    want = decoded(target, None, params)
    assert decoded(target, drafter(target, draft, overlap=overlap), params)[0] == want[0]
    wrong = ToyRunner(VOCAB, seed=4, sharpness=1.5)
    assert decoded(wrong, drafter(wrong, draft, overlap=overlap), params)[0] != want[0]


class Slow(ToyRunner):
    """A toy that takes its time in some passes."""

    wait = 0.0

    def _scores(self, *given: Any) -> Any:
        sleep(self.wait)
        return super()._scores(*given)


class Racing(PearlDrafter):
    """Wrong: what the clock brings in too late is not used."""

    def ahead(self, states: Any, trees: Any) -> Any:
        found = super().ahead(states, trees)
        before = self.target_calls()
        if found is None:
            return None

        def work() -> list[DraftedToken | None]:
            guesses = list(found.run())
            if self.target_calls() > before:
                for state in states:
                    state.drafted = state.drafted[:0]
                return [None] * len(states)
            return guesses

        return replace(found, run=work)

    target_calls: Any = None


@pytest.mark.parametrize("params", [replace(GREEDY, max_tokens=12), replace(GREEDY, temperature=1.0, max_tokens=12)])
def test_no_clock_decides(params: SamplingParams) -> None:
    """Tokens and steps are the same whichever thread is slow. Negative control: a drafter that races."""

    def outcomes(kind: type[PearlDrafter]) -> list[Any]:
        found = []
        for slow_target in (False, True):
            options = {"seed": 3, "sharpness": 1.5}
            target, draft = Slow(VOCAB, **options), Slow(VOCAB, noise=0.7, **options)  # type: ignore[arg-type]
            (target if slow_target else draft).wait = 4e-3
            args = DrafterArgs(
                vocab_size=VOCAB, index=0, max_context=4096, target=target, load_runner=lambda name, d=draft: d
            )
            made = kind(args, model="toy", num_speculative_tokens=3, overlap=True)
            if isinstance(made, Racing):
                made.target_calls = lambda target=target: target.calls
            found.append(decoded(target, made, params, BATCH[:2]))
        return found

    first, second = outcomes(PearlDrafter)
    assert first == second
    first, second = outcomes(Racing)
    assert first[1] != second[1]


def distribution(target: ToyRunner, length: int) -> dict[tuple[int, ...], float]:
    """Chance of every continuation of the prompt."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*text, token): chance * p
            for text, chance in found.items()
            for token, p in enumerate(torch.softmax(target.logits([*PROMPT, *text]).double(), 0).tolist())
        }
    return found


def p_value(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of "outputs of three tokens have the target's distribution". Wrong: a token that says it was drawn from another
    row.
    """
    if wrong:
        true = pearl.first_drafted
        flat = torch.full((VOCAB,), 1 / VOCAB)
        monkeypatch.setattr(
            pearl, "first_drafted", lambda *given: (one := true(*given)) and DraftedToken(one.token, flat)
        )
    target, draft = models(1.5)
    live = engine(target, [drafter(target, draft, 2)], 9, max_num_seqs=128)
    params = SamplingParams(temperature=1.0, max_tokens=3, n=128, ignore_eos=True)
    found = [tokens(run(live, [PROMPT], params, seed))[0] for seed in range(5)]
    counts = Counter(tuple(one) for each in found for one in each)
    chances = distribution(target, 3)
    return g_test([counts[text] for text in chances], list(chances.values()))


def test_outputs_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """(d), and its negative control."""
    assert p_value(False, monkeypatch) > ERROR
    assert p_value(True, monkeypatch) < ERROR


class Failing(ToyRunner):
    """A toy whose passes fail for texts with some token in it."""

    bad: int | None = None

    def extend(self, caches: Any, chunks: Any, **options: Any) -> Any:
        found = super().extend(caches, chunks, **options)
        if any(self.bad in cache.tokens for cache in caches):
            raise RuntimeError("out of luck")
        return found


def test_a_draft_that_fails_on_its_thread_is_dropped_for_that_request(caplog: pytest.LogCaptureFixture) -> None:
    target = models()[0]
    draft = Failing(VOCAB, seed=3, sharpness=1.5)
    want = decoded(target, None, GREEDY)
    draft.bad = 5  # in the prompt of the second
    draft_of = drafter(target, draft)
    with caplog.at_level(logging.WARNING):
        found = decoded(target, draft_of, GREEDY)
    assert found[0] == want[0]
    assert "RuntimeError: out of luck" in found[2][1]["pearl"]
    assert "goes on without drafter pearl (RuntimeError: out of luck)" in caplog.text
    saved = [i for i, text in enumerate(want[0]) if 5 not in [*BATCH[i], *text[0]]]
    assert all(found[2][i] == {} and found[1][i] < want[1][i] for i in saved)
    assert draft.open_caches == target.open_caches == 0


def test_it_goes_on_in_batches_that_change_and_leaves_nothing_behind() -> None:
    target, draft = models()
    params = [
        replace(GREEDY, max_tokens=n, n=k, temperature=t)
        for n, k, t in ((9, 1, 0.0), (30, 3, 0.8), (17, 1, 0.0), (5, 2, 1.0))
    ]
    live = engine(target, [drafter(target, draft)], 9, max_num_seqs=4)
    found = run(live, BATCH, params)
    assert [len(o.token_ids) for r in found for o in r.outputs] == [9, 30, 30, 30, 17, 5, 5]
    assert not any(request.metrics.dropped_drafters for request in found)
    assert draft.open_caches == target.open_caches == 0


def test_the_short_context_of_a_draft_ends_it() -> None:
    target, draft = models(0.0, max_context=20)
    texts, _, dropped = decoded(target, drafter(target, draft), GREEDY)
    assert texts == decoded(target, None, GREEDY)[0]
    assert not any(dropped)


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_mode_is_taken_and_said_once(faster: bool, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    choices = OverlapChoices("pearl", None, lambda: now[0])
    modes = []
    with caplog.at_level(logging.INFO, "paceline.drafters"):
        for _ in range(STEPS * (TURNS + 4)):
            modes.append(overlapped := choices.overlapped(2))
            now[0] += 1.0 if overlapped == faster else 2.0
            choices.stepped(2, 3, alone=not overlapped)
    assert modes[: STEPS * TURNS] == [turn % 2 == 1 for turn in range(TURNS) for _ in range(STEPS)]
    assert set(modes[STEPS * TURNS :]) == {faster}
    (record,) = caplog.records
    assert record.levelname == ("INFO" if faster else "WARNING")
    assert ("going on sequentially" in record.message) != faster


def test_a_step_that_nobody_was_asked_for_counts_for_nothing() -> None:
    choices = OverlapChoices("pearl", None)
    for _ in range(STEPS * TURNS):
        choices.stepped(1, 5, alone=True)
    assert choices.of(1) == OverlapChoice()


def test_the_window_is_what_fits_beside_a_pass() -> None:
    now = [0.0]
    choices = OverlapChoices("pearl", None, lambda: now[0])
    for _ in range(3):
        choices.overlapped(1)
        now[0] += 0.4
        choices.drafted(4)
        now[0] += 0.7
        choices.stepped(1, 5, alone=True)
    assert choices.of(1).window == 7


def on(runner: ToyRunner, device: str) -> ToyRunner:
    runner.info = replace(runner.info, device=torch.device(device))
    return runner


def test_on_one_gpu_it_is_sequential_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = (on(one, "cuda:0") for one in models())
    made = drafter(target, draft, overlap=None)
    assert made.choices.always is False
    assert "going on sequentially" in caplog.text
    with pytest.raises(CapabilityError, match="another device"):
        drafter(target, draft, overlap=True)
    other = drafter(target, on(draft, "cuda:1"), overlap=True)
    assert other.choices.always is True
    assert not other.shared


def test_it_is_rejected_inside_a_hierarchy(bundled: LLM) -> None:
    with pytest.raises(DrafterError, match="'pearl', which cannot go back"):
        bundled.with_speculative_config(
            {"method": "specmquant", "draft": {"method": "pearl", "model": str(BUNDLED_DRAFT)}}
        )


@pytest.mark.parametrize("more", [{}, {"controller": "auto"}])
def test_beside_other_drafters_and_under_auto(bundled: LLM, prompts: list[Any], more: dict[str, Any]) -> None:
    one = {"method": "pearl", "model": str(BUNDLED_DRAFT)}
    fast = bundled.with_speculative_config({"method": ["ngram", one], "num_speculative_tokens": 5} | more)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    found, want = fast.generate(prompts, params), bundled.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in want]
    assert not any(out.metrics.dropped_drafters for out in found)


@pytest.mark.parametrize(
    ("options", "words"), [({"overlap": 1}, "overlap must be"), ({"model": None}, "folder or hub id")]
)
def test_bad_options_are_rejected(options: dict[str, Any], words: str) -> None:
    target, draft = models()
    args = DrafterArgs(vocab_size=VOCAB, index=0, max_context=64, target=target, load_runner=lambda name: draft)
    with pytest.raises(ConfigError, match=words):
        PearlDrafter(args, **{"model": "toy"} | options)


def test_on_real_models_with_two_threads(bundled: LLM, prompts: list[Any]) -> None:
    plain = bundled
    fast = plain.with_speculative_config(
        {"method": "pearl", "model": str(BUNDLED_DRAFT), "num_speculative_tokens": 4, "overlap": True}
    )
    threads = torch.get_num_threads()
    for params in (
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=30),
    ):
        for some in (prompts[:1], prompts):
            found, want = fast.generate(some, params), plain.generate(some, params)
            assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in want]
            assert not any(out.metrics.dropped_drafters for out in found)
            assert sum(out.metrics.num_accepted_tokens for out in found) > 0
    assert torch.get_num_threads() == threads
