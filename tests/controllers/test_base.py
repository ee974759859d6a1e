"""What a policy need not have: the base class drafts nothing, and the engine can do with every default of it."""

from __future__ import annotations

import pytest
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers.base import Controller
from paceline.drafters.base import DrafterArgs
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.policy import PARTS
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Budget

PROMPT = [1, 2, 3, 1, 2, 3, 1]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Bare(Controller):
    name = "bare"


class Generous(Bare):
    """Only says how much."""

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        return Budget(3, 3)


@pytest.mark.parametrize(("controller", "drafts"), [(Bare(), False), (Generous(), True)])
def test_the_engine_decodes_under_the_defaults(controller: Controller, drafts: bool) -> None:
    runner = ToyRunner()
    drafter = NgramDrafter(DrafterArgs(vocab_size=runner.info.vocab_size, index=0, max_context=512))
    requests = run(engine(runner, [drafter], controller=controller), [PROMPT], PARAMS)
    assert tokens(requests) == [[runner.greedy(PROMPT, 12)]]
    assert (requests[0].metrics.num_draft_tokens > 0) == drafts
    assert controller.explain(0) == ""


def test_the_engine_asks_for_all_parts_of_the_class_and_no_more() -> None:
    public = {name for name in {*vars(Controller), *Controller.__annotations__} if not name.startswith("_")}
    assert set(PARTS) == public
