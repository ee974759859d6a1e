"""Reflective verification: drafts are shown twice in one pass, mixed as defined, and only the drafts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine.harness import engine, run
from engine.test_loop import Guess
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.config import SpeculativeConfig
from paceline.drafters.base import Context, Drafter
from paceline.engine import Engine
from paceline.errors import CapabilityError, ConfigError
from paceline.llm import BUNDLED
from paceline.tree import PROBE, ROOT, Budget, TokenTree, Trial
from paceline.verifiers import RecursiveRejection, Reflection
from paceline.verifiers.reflective import Reflective

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 1, 2, 3]]
ASKS, CUE, NODES = (3, 9, 4), 2, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)


def rule(alpha: float) -> Reflective:
    made = Reflective(alpha or 1.0, ASKS, CUE)
    made.reflection = Reflection(alpha, ASKS, CUE)
    return made


def live(sampled: Any, *, runner: ToyRunner | None = None, drafter: Any = Guess) -> Engine:
    runner = runner or ToyRunner(order=None)
    made = engine(runner, [drafter(runner)], NODES, sampled=sampled)
    if zero := sampled.at_zero():
        made.parts.greedy = zero
    return made


def written(sampled: Any, params: SamplingParams = GREEDY, **how: Any) -> list[tuple[list[int], int]]:
    """Tokens and departures of every prompt."""
    return [
        (one.outputs[0].token_ids, one.metrics.num_departures) for one in run(live(sampled, **how), PROMPTS, params)
    ]


def test_a_chain_is_shown_twice_and_the_second_copy_is_never_accepted() -> None:
    tree = TokenTree.chain([7, 8, 7]).replace(trials={ROOT: (Trial(0, torch.full((16,), 1 / 16)),)})
    wide = Reflection(0.5, ASKS, CUE).widened(tree, [1, 2, 3])
    assert wide.tokens.tolist() == [7, 8, 7, *ASKS, 2, 3, 7, 8, 7]
    assert wide.is_chain
    assert wide.kinds.tolist() == [0] * 3 + [PROBE] * 8
    rows = torch.arange(12.0)[:, None].expand(12, 4)
    assert Reflection(0.25, ASKS, CUE).mixed(rows, 3)[:, 0].tolist() == [o + 0.25 * 8 for o in range(4)]
    empty = TokenTree.chain([])
    assert Reflection(0.5, ASKS, CUE).widened(empty, [1]) is empty
    with pytest.raises(CapabilityError, match="acceptance_method 'reflective' judges chains"):
        Reflection(0.5, ASKS, CUE).widened(TokenTree.build([0, 1], [ROOT, ROOT]), [1])


def by_hand(prompt: Sequence[int], alpha: float) -> tuple[list[int], int]:
    """Tokens and departures at temperature 0, from the definition."""
    runner, text, departures = ToyRunner(order=None), list(prompt), 0
    guess, size = Guess(runner), len(prompt) + GREEDY.max_tokens
    while len(text) < size:
        depth = min(NODES, size - len(text) - 1)
        drafts = guess._one(text, Budget(depth, depth)).tokens.tolist() if depth else []
        second = [*text, *drafts, *ASKS, *text[-CUE:]]
        for place in range(len(drafts) + 1):
            own = runner.logits([*text, *drafts[:place]])
            again = runner.logits([*second, *drafts[:place]])
            mixed = (1 - alpha) * own + alpha * again if drafts else own
            token = int(mixed.argmax())
            departures += token != int(own.argmax())
            if place == len(drafts) or token != drafts[place]:
                text += [*drafts[:place], token]
                break
    return text[len(prompt) :], departures


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_texts_and_departures_are_those_of_the_definition(alpha: float) -> None:
    found = written(rule(alpha))
    assert found == [by_hand(prompt, alpha) for prompt in PROMPTS]
    assert all(departures for _, departures in found)


def test_the_comparison_catches_rows_shifted_by_one_and_another_cue(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [by_hand(prompt, 0.5) for prompt in PROMPTS]
    assert written(rule(0.5)) == expected
    other = rule(0.5)
    other.reflection = Reflection(0.5, ASKS, CUE + 1)
    assert written(other) != expected
    shifted = lambda self, rows_mv, n: torch.lerp(rows_mv[: n + 1], rows_mv[-n - 2 : -1], self.alpha)  # noqa: E731
    monkeypatch.setattr(Reflection, "mixed", shifted)
    assert written(rule(0.5)) != expected


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_without_a_share_it_is_the_exact_rule(params: SamplingParams) -> None:
    """Also where the second copy is scored all the same: its keys and values are dropped."""
    exact = written(RecursiveRejection(), params)
    assert Reflective(0.0, ASKS).reflection is None
    assert written(Reflective(0.0, ASKS), params) == exact
    assert written(rule(0.0), params) == exact
    assert written(rule(0.6), params) != exact


def test_drafts_without_room_for_a_second_copy_are_judged_once() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    runner = ToyRunner(order=None, max_context=40)
    for tokens, _ in written(rule(0.5), long, runner=runner):
        assert len(tokens) >= 30


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None, seed=3)


def test_the_second_copy_changes_nothing_of_the_first(llm: LLM) -> None:
    """Rows of the drafts are those without it; a copy in front of them would change them."""
    text = llm.tokenizer.encode("def f(x):\n    return x + 1\n")
    tree, cache = TokenTree.chain(text[-5:]), llm.runner.open()
    llm.runner.extend([cache], [text[:-6]])
    wide = Reflection(0.5, tuple(llm.tokenizer.encode("Check:")), 4).widened(tree, text[:-5])
    alone = llm.runner.score([cache], [text[-6]], [tree]).logits
    beside = llm.runner.score([cache], [text[-6]], [wide]).logits
    torch.testing.assert_close(beside[:6], alone, atol=1e-4, rtol=0.0)
    assert (beside[-6:] - alone).abs().max() > 0.1
    llm.runner.release(cache)


class RandomDrafts(Drafter):
    """Chains of tokens that have nothing to do with the text."""

    name = "random"

    def __init__(self, args: Any) -> None:
        self.index, self.size = args.index, args.vocab_size

    def begin(self, contexts: Sequence[Context]) -> list[Context]:
        return list(contexts)

    def propose(self, states: Any, budgets: Any, so_far: Any) -> list[TokenTree]:
        count = min(budgets[0].nodes, budgets[0].depth, 6)
        drawn = [torch.Generator().manual_seed(len(state.tokens)) for state in states]
        each = [torch.randint(self.size, (count,), generator=one).tolist() for one in drawn]
        return [TokenTree.chain(tokens, source=self.index) for tokens in each]

    def fork(self, state: Any, context: Context) -> Context:
        return context


def accepted(llm: LLM, alpha: float) -> int:
    """Random drafts that stand at temperature 0."""
    config = {"method": f"{__name__}:RandomDrafts", "num_speculative_tokens": 6}
    relaxed = llm.with_speculative_config(config | {"acceptance_method": "reflective", "reflective_alpha": alpha})
    texts = ["The first thing is", "def f(x):", "SELECT name FROM"]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return sum(out.metrics.num_accepted_tokens for out in relaxed.generate(texts, params))


def test_random_drafts_are_accepted_no_more_than_by_the_exact_rule(llm: LLM) -> None:
    """At the default share; what accepts an echo of anything fails here."""
    assert accepted(llm, 0.3) <= accepted(llm, 0.0)


def test_the_count_of_random_drafts_catches_an_echo(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, real = list[torch.Tensor](), Reflection.widened

    def remembers(self: Reflection, tree: TokenTree, text: Sequence[int]) -> TokenTree:
        if len(tree):
            shown.append(torch.tensor([*tree.tokens.tolist(), 0]))
        return real(self, tree, text)

    def echo(self: Reflection, rows_mv: torch.Tensor, n: int) -> torch.Tensor:
        return rows_mv[: n + 1] + 100.0 * torch.nn.functional.one_hot(shown.pop(0), rows_mv.shape[1])

    monkeypatch.setattr(Reflection, "widened", remembers)
    monkeypatch.setattr(Reflection, "mixed", echo)
    assert accepted(llm, 0.3) > accepted(llm, 0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reflective_alpha": 1.5}, "reflective_alpha must be in 0..1"),
        ({"reflective_prompt": ""}, "reflective_prompt must be a text or token ids, not empty"),
        ({"reflective_prompt": [-1]}, "reflective_prompt must be a text or token ids, not empty"),
        ({"reflective_context": -1}, "reflective_context"),
    ],
)
def test_bad_options_get_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse({"method": "ngram", "acceptance_method": "reflective"} | given)


def test_a_prompt_of_ids_that_the_model_lacks_is_rejected(llm: LLM) -> None:
    draft = {"method": "draft_model", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="reflective_prompt must have token ids in 0"):
        llm.with_speculative_config(draft | {"acceptance_method": "reflective", "reflective_prompt": [10**7]})
    with pytest.raises(ConfigError, match="reflective_prompt must have less than half of the context's"):
        llm.with_speculative_config(draft | {"acceptance_method": "reflective", "reflective_prompt": [5] * 9999})
