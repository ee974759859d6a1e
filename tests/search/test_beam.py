"""Beam search gives the texts of transformers' beam search; groups of beams keep away from each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_TARGET, bundled_prompts
from paceline.errors import ConfigError
from paceline.search import BeamSearchParams

TOKENS = 16


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    texts = [one.prompt for one in bundled_prompts()]
    beginnings = [text[:size] for text in texts for size in (20, 40, 60, 90)]
    return [llm.tokenizer.encode(text) for text in beginnings][:24]


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32).eval()


def found(llm: LLM, prompts: list[list[int]], count: int = 1, **search: Any) -> list[list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, n=count)
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    results = llm.generate(asked, params, use_tqdm=False, search={"method": "beam", **search})
    return [[one.token_ids for one in result.outputs] for result in results]


SETTINGS = [
    {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_those_of_transformers(
    llm: LLM, reference: Any, prompts: list[list[int]], setting: dict[str, Any]
) -> None:
    taken = prompts[:20] if setting is SETTINGS[0] else prompts[:6]
    ours = found(llm, taken, 2, **setting)
    for prompt, texts in zip(taken, ours, strict=True):
        made = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=TOKENS, num_return_sequences=2, eos_token_id=list(llm.defaults.eos_ids), pad_token_id=0,
            repetition_penalty=1.0, **setting,
        )  # fmt: skip
        expected = [row[len(prompt) :].tolist() for row in made]
        assert [one + [0] * (len(row) - len(one)) for one, row in zip(texts, expected, strict=True)] == expected
    others = found(llm, taken[:6], 2, **setting | {"num_beams": 2, "length_penalty": 1.0})
    assert others != ours[:6]


def test_ended_texts_compete_as_in_transformers(llm: LLM, reference: Any, prompts: list[list[int]]) -> None:
    """Ends are made likelier, so that texts of many lengths are ranked, and that it matters when a search ends."""
    transformers = pytest.importorskip("transformers")
    ends = sorted(llm.defaults.eos_ids)

    class Likelier(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, ends] += 9.0
            return scores

    how = SamplingParams(temperature=0.0, max_tokens=TOKENS, n=2, logit_bias=dict.fromkeys(ends, 9.0))
    taken, different = [prompts[9], prompts[23]], set()
    for penalty, early in ((0.0, False), (2.0, False), (2.0, True), (2.0, "never"), (-1.0, False)):
        setting = {"num_beams": 3, "length_penalty": penalty, "early_stopping": early}
        asked = [{"prompt_token_ids": ids} for ids in taken]
        results = llm.generate(asked, how, use_tqdm=False, search={"method": "beam", **setting})
        for prompt, result in zip(taken, results, strict=True):
            made = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=TOKENS, num_return_sequences=2, eos_token_id=ends, pad_token_id=0,
                repetition_penalty=1.0, renormalize_logits=True, logits_processor=[Likelier()],
                return_dict_in_generate=True, output_scores=True, **setting,
            )  # fmt: skip
            expected = [row[len(prompt) :].tolist() for row in made.sequences]
            ours = [one.token_ids for one in result.outputs]
            assert [one + [0] * (len(row) - len(one)) for one, row in zip(ours, expected, strict=True)] == expected
            assert [one.score for one in result.outputs] == pytest.approx(made.sequences_scores.tolist(), rel=1e-3)
        different.add(str([[one.token_ids for one in result.outputs] for result in results]))
    assert len(different) == 5, "each setting counts"


def test_one_beam_is_greedy_decoding(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    plain = llm.generate([{"prompt_token_ids": ids} for ids in prompts[:8]], params)
    assert found(llm, prompts[:8], beam_width=1) == [[one.outputs[0].token_ids] for one in plain]


def test_stop_strings_and_rules_hold_in_every_beam(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, n=4, stop=["return"], logit_bias={300: -100.0})
    (result,) = llm.generate("def fib(n):", params, search={"method": "beam", "beam_width": 4})
    for one in result.outputs:
        assert "return" not in one.text
        assert 300 not in one.token_ids
    assert any(one.stop_reason == "return" for one in result.outputs)
    digits = SamplingParams(temperature=0.0, max_tokens=8, n=3, structured_outputs={"regex": "[0-9]{4}"})
    (result,) = llm.generate("The year is ", digits, search={"method": "beam", "beam_width": 3})
    assert all(len(one.text) == 4 and one.text.isdigit() for one in result.outputs)
    assert len({one.text for one in result.outputs}) == 3


def test_scores_and_the_tree_tell_of_every_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, n=4)
    (result,) = llm.generate("Once upon a time", params, search={"method": "beam", "beam_width": 4})
    tree = result.search
    assert tree is not None
    assert tree.num_passes <= TOKENS
    assert [one.score for one in result.outputs] == tree.scores == sorted(tree.scores, reverse=True)
    for one, node in zip(result.outputs, tree.outputs, strict=True):
        path, at = [], node
        while tree.parents[at] >= 0:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        assert path[::-1] == one.token_ids
        assert one.cumulative_logprob == pytest.approx(one.score * len(one.token_ids))
    assert result.to_dict()["search"]["method"] == "beam"


def test_vllms_form(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    first, second = llm.beam_search(["Once upon a time", {"prompt": "def f"}], params, concurrency_limit=1)
    assert len(first.sequences) == len(second.sequences) == 3
    best = first.sequences[0]
    prompt = llm.tokenizer.encode("Once upon a time")
    assert best.tokens[: len(prompt)] == prompt
    assert [best.tokens[len(prompt) :]] == found(llm, [prompt], beam_width=3)[0] or len(best.tokens) == len(prompt) + 8


def groups(llm: LLM, **search: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, n=search["beam_width"], ignore_eos=True)
    (result,) = llm.generate("Once upon a time", params, search={"method": "diverse_beam", **search})
    return [one.token_ids for one in result.outputs]


def plain(llm: LLM, width: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, n=width, ignore_eos=True)
    (result,) = llm.generate("Once upon a time", params, search={"method": "beam", "beam_width": width})
    return [one.token_ids for one in result.outputs]


def test_groups_without_penalty_are_copies_and_one_group_is_beam_search(llm: LLM) -> None:
    assert groups(llm, beam_width=4, num_beam_groups=1, diversity_penalty=9.0) == plain(llm, 4)
    assert sorted(groups(llm, beam_width=4, num_beam_groups=2, diversity_penalty=0.0)) == sorted(2 * plain(llm, 2))


def test_a_large_penalty_makes_first_tokens_distinct_and_the_first_group_is_beam_search(llm: LLM) -> None:
    apart = groups(llm, beam_width=4, diversity_penalty=1e6)
    assert len({tokens[0] for tokens in apart}) == 4
    assert len({tokens[0] for tokens in plain(llm, 4)}) < 4
    assert plain(llm, 1)[0] in apart
    two = groups(llm, beam_width=4, num_beam_groups=2, diversity_penalty=1e6)
    assert all(one in two for one in plain(llm, 2))


def test_the_penalty_counts_in_the_choice_alone_and_ends_are_exempt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, n=4)
    search = {"method": "diverse_beam", "beam_width": 4, "diversity_penalty": 1e6}
    (result,) = llm.generate("Once upon a time", params, search=search)
    for one in result.outputs:
        assert one.cumulative_logprob == pytest.approx(one.score * len(one.token_ids), rel=1e-4)
    (end,) = list(llm.defaults.eos_ids)[:1]
    params.logit_bias = {end: 40.0}
    (result,) = llm.generate("Once upon a time", params, search=search)
    assert [one.token_ids for one in result.outputs] == [[end]] * 4


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"method": "beams"}, "unknown search method 'beams'; did you mean beam"),
        ({"method": "beam", "width": 3}, "beam_width"),
        ({"method": "beam", "beam_width": 0}, "beam_width must be an integer"),
        ({"method": "beam", "early_stopping": "always"}, "early_stopping must be one of never"),
        ({"method": "diverse_beam", "num_beam_groups": 3}, "num_beam_groups must divide beam_width"),
        ({"method": "beam", "budget_tokens": 0}, "budget_tokens"),
        ({"beam_width": 3}, "search must be the name of a method"),
        ("{", "search"),
    ],
)
def test_bad_settings_get_one_line(llm: LLM, search: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate("One", search=search)


def test_what_a_search_cannot_honour_is_named(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="logprobs must be left out with search"):
        llm.generate("One", SamplingParams(logprobs=2), search="beam")
