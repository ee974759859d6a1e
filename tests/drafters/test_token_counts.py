"""Counts of a target's tokens: what they cover of other texts, how many tokens a head should keep, and that draft
models use them unasked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_models import ToyModels
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.checkpoints import Tokenizer
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.vocab import STEP, TokenCounts, counts_path
from paceline.drafters.vocab.trimmed_head import cut_head, indispensable
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.tree import EMPTY_TREE, Budget

TARGET, DRAFT = BUNDLED / "target", str(BUNDLED / "draft")
SIZE = 6144
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.load(TARGET)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    return tmp_path


def counted(*texts: list[int], size: int = SIZE, tokenizer: str = "t") -> TokenCounts:
    return TokenCounts.of(texts, size, tokenizer=tokenizer, model="m", origin="texts")


def test_coverage_is_judged_on_texts_that_did_not_choose() -> None:
    """The first half holds 5,000 three times and 4,000 once, the second 5,000 once and 3,000 once: each judges the
    tokens that the other puts before the lowest ids.
    """
    found = counted([5000, 3000], [5000, 5000, 4000, 5000])
    # 1,024 tokens chosen by one half: its own, and the lowest ids. Of the other half they hold 5,000 alone.
    assert found.coverage(set())[:2] == pytest.approx([0.0, (1 / 2 + 3 / 4) / 2])
    # 4,096 hold 3,000 and 4,000 too, for these are low
    assert found.coverage(set())[4] == pytest.approx(1.0)
    assert found.coverage({3000})[1] == pytest.approx((1.0 + 3 / 4) / 2), "what is always kept is covered"
    itself = counted([5000, 3000, 4000], [5000, 3000, 4000])
    assert itself.coverage(set())[1] == 1.0, "the control: halves that are alike cover each other"


def test_one_text_is_cut_into_two() -> None:
    found = counted([1, 1, 2, 2])
    assert found.halves[:, :3].tolist() == [[0, 2, 0], [0, 0, 2]]
    assert (found.texts, found.tokens) == (1, 4)
    assert counted().tokens == 0
    assert counted([7, 99999, -1]).tokens == 1, "ids beyond the vocabulary are none"


def test_a_head_keeps_what_is_worth_its_time() -> None:
    """By arithmetic: of 6 steps of 1,024 tokens one covers all, and each costs a sixth of the head's share."""
    certain = counted(*[list(range(900))] * 4)
    assert certain.best_size(set(), 0.3) == STEP
    half = counted(*[[1] * 95 + [5500] * 5, [1] * 95 + [5400] * 5] * 2)  # 5 % of each half are unknown to the other
    saved, lost = 0.3 * 5 / 6, 3.0 * 0.05
    assert saved > lost
    assert half.best_size(set(), 0.3) == STEP
    assert lost > 0.1 * 5 / 6
    assert half.best_size(set(), 0.1) == SIZE, "a head of a tenth is not worth them"
    assert certain.best_size(set(range(1500)), 0.3) == 2 * STEP, "what must be kept has room"
    assert counted().best_size(set(), 0.9) == SIZE, "nothing was counted"


def test_files_hold_all_of_it_and_damage_is_told(tmp_path: Path) -> None:
    found = counted([5, 5, 6], [7])
    found.save(tmp_path / "a" / "counts.json")
    again = TokenCounts.load(tmp_path / "a" / "counts.json")
    assert (again.halves == found.halves).all()
    assert (again.tokenizer, again.model, again.origin, again.texts) == ("t", "m", "texts", 2)
    both = again.plus(counted([8]))
    assert (both.texts, both.tokens) == (3, 5)
    with pytest.raises(ConfigError, match="two tokenizers"):
        again.plus(counted([8], tokenizer="other"))
    document = json.loads((tmp_path / "a" / "counts.json").read_text())
    for damage in ({"halves": [{}]}, {"halves": [{"99999": 1}, {}]}, {"halves": [{"1": -1}, {}]}, {"vocab_size": "x"}):
        (tmp_path / "b.json").write_text(json.dumps(document | damage))
        with pytest.raises(ConfigError, match="damaged"):
            TokenCounts.load(tmp_path / "b.json")
    for text, why in (("{", "cannot be read"), ('{"format": "x"}', "holds no counts")):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ConfigError, match=why):
            TokenCounts.load(tmp_path / "b.json")


def written(words: Tokenizer, llm: LLM) -> TokenCounts:
    """Counts of what the target writes."""
    prompts = [{"prompt_token_ids": words.encode(f"The {name}")} for name in ("dog", "cat", "tree", "house")]
    texts = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]  # type: ignore[arg-type]
    return TokenCounts.of(texts, SIZE, tokenizer=words.fingerprint(), model="bundled", origin="texts")


def test_draft_models_use_counts_unasked(plain: LLM, words: Tokenizer, cache: Path) -> None:
    prompt: Any = {"prompt_token_ids": words.encode("The dog")}
    (want,) = plain.generate(prompt, GREEDY)

    def opened(**options: Any) -> tuple[LLM, DraftModelDrafter]:
        llm = plain.with_speculative_config({"method": "draft_model", "num_speculative_tokens": 3, **options})
        (drafter,) = llm.engine.parts.drafter_set.drafters
        assert isinstance(drafter, DraftModelDrafter)
        return llm, drafter

    _, before = opened()
    assert before.note == "", "nothing was counted: the control"
    counts = written(words, plain)
    counts.save(counts_path(plain.folder))
    llm, drafter = opened()
    size = counts.best_size(indispensable(words), plain.models.head_share(DRAFT))
    assert STEP <= size < SIZE
    assert drafter.note.startswith(f"the head keeps {size:,} of 6,144 tokens, chosen by what the target wrote")
    (found,) = llm.generate(prompt, GREEDY)
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    assert found.metrics.num_accepted_tokens > 0
    row = drafter.runner.extend([drafter.runner.open()], [[1]]).logits[0]
    kept = set(torch.isfinite(row).nonzero().flatten().tolist())
    assert len(kept) == size
    assert set(np.flatnonzero(counts.total).tolist()) | indispensable(words) <= kept
    assert opened(draft_vocab_size="all")[1].note == ""
    assert opened(draft_vocab_size=1500)[1].note.startswith("the head keeps 1,500 of 6,144 tokens, chosen by what")
    auto = plain.with_speculative_config({"method": "auto", "model": DRAFT})
    assert drafter.note in [one.note for one in auto.engine.parts.drafter_set.drafters]
    whole = plain.with_speculative_config({"method": "auto", "model": DRAFT, "draft_vocab_size": "all"})
    assert not any(one.note for one in whole.engine.parts.drafter_set.drafters)


def test_counts_of_no_use_leave_the_head_whole(
    plain: LLM, words: Tokenizer, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = counts_path(plain.folder)
    for spoil in (lambda: path.write_text("{"), lambda: counted([5] * 50, [5] * 50).save(path)):
        path.parent.mkdir(exist_ok=True)
        spoil()
        caplog.clear()
        assert cut_head(None, None, plain.models, SIZE, model=DRAFT).tokens is None
        assert "the draft's head keeps all tokens" in caplog.text
    with pytest.raises(ConfigError, match="are of another tokenizer"):
        cut_head(2000, str(path), plain.models, SIZE, model=DRAFT)


def test_a_file_alone_says_how_many(plain: LLM, words: Tokenizer, cache: Path) -> None:
    (cache / "text.txt").write_text("the dog and the cat " * 200)
    cut = cut_head(None, str(cache / "text.txt"), plain.models, SIZE, model=DRAFT)
    assert cut.tokens is not None
    assert set(words.encode("the dog and the cat ", add_special_tokens=False)) <= set(cut.tokens)
    (cache / "plain.json").write_text('{"5": 3}')
    with pytest.raises(ConfigError, match=r"plain counts.*give draft_vocab_size too"):
        cut_head(None, str(cache / "plain.json"), plain.models, SIZE, model=DRAFT)
    lowest = cut_head(2000, None, plain.models, SIZE, model=DRAFT)
    assert "lowest ids; `paceline count-tokens`" in lowest.words
    for size, file in (("most", None), ("all", "x")):
        with pytest.raises(ConfigError, match="'all'"):
            plain.with_speculative_config(
                {"method": "draft_model", "draft_vocab_size": size, **({"draft_vocab_file": file} if file else {})}
            )


def test_drawn_drafts_come_from_a_distribution_over_kept_tokens(plain: LLM, words: Tokenizer, cache: Path) -> None:
    """q sums to 1, and is 0 where the head has no row: else verification would weigh p against a wrong q."""
    counts = written(words, plain)
    counts.save(counts_path(plain.folder))
    args = DrafterArgs(vocab_size=SIZE, index=0, max_context=200, load_runner=plain.models.open, models=plain.models)
    cut, whole = (DraftModelDrafter(args, model=DRAFT, draft_vocab_size=size) for size in (None, "all"))
    text = words.encode("The dog and the")
    rows = []
    for drafter in (cut, whole):
        (state,) = drafter.begin([Context("r", list(text), len(text), 1.0)])
        (tree,) = drafter.propose([state], [Budget(2, 2)], [EMPTY_TREE])
        drafter.end([state])
        trial = tree.trials[-1][0]
        assert trial.drawn
        rows.append(trial.row)
    q, p = rows
    kept = torch.zeros(SIZE, dtype=torch.bool)
    kept[cut_head(None, None, plain.models, SIZE, model=DRAFT).tokens] = True
    assert float(q.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(q[~kept].sum()) == 0.0
    assert float(p[~kept].sum()) > 0.0, "the control: the whole head gives them some chance"
    assert torch.allclose(q[kept], p[kept] / p[kept].sum(), atol=1e-6), "the same numbers, renormalised"


def test_the_share_of_a_head(plain: LLM) -> None:
    config = json.loads((Path(DRAFT) / "config.json").read_text())
    runner = plain.models.open(DRAFT)
    head = config["vocab_size"] * config["hidden_size"]
    numbers = runner.info.weight_bytes / runner.info.dtype.itemsize
    assert plain.models.head_share(DRAFT) == pytest.approx(head / numbers, rel=0.01)
    toys = ToyModels(ToyRunner(11), ToyRunner(11))
    assert toys.counts_file() is None
