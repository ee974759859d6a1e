"""`--skipping`: what is written is called approximate, and is the same with drafts; what is wrong is told in a line."""

from __future__ import annotations

import json

import pytest
from command import Command

from paceline import LLM, ConfigError, SamplingParams
from paceline.assembly import open_skipping

PROMPT = "def fibonacci(n):\n" * 4


def test_drafts_write_what_the_skipping_writes(run: Command) -> None:
    chosen = {"method": "unified_layer_skipping", "speedup": 1.5}
    flags = (PROMPT, "--temperature", "0", "--max-tokens", "8", "-s", "ngram", "--skipping", json.dumps(chosen))
    written = run("generate", *flags)
    assert (written.code, "outputs are approximate" in written.err) == (0, True)
    plain, whole = (LLM(skipping=one, speculative_config=None) for one in (chosen, None))
    answers = [
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0] for llm in (plain, whole)
    ]
    assert written.out.strip() == answers[0].text.strip()
    assert answers[0].token_ids != answers[1].token_ids, "the control"
    assert "unified_layer_skipping leaves out a part of the passes" in str(plain.exactness)


def test_of_a_batch_each_is_as_alone() -> None:
    llm = LLM(skipping={"method": "lora_drop", "drop": 0.3, "reuse": 2}, dtype="float32", speculative_config=None)
    prompts = [PROMPT[:12], "Once upon a time", PROMPT]
    params = SamplingParams(temperature=0, max_tokens=12)
    together = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    again = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert together == again  # with what was kept of the first time


def test_what_is_refused(run: Command) -> None:
    for given, why in (
        ("nothing", "unknown skipping method 'nothing'"),
        ("hcot", "skipping 'hcot' needs 'path'; give it beside the method"),
        ('{"method": "lora_drop", "dropp": 0.5}', "dropp"),
        ('{"speedup": 3}', "skipping must be a dict with a method"),
    ):
        found = run("generate", PROMPT, "--skipping", given)
        assert (found.code, why in found.err, found.err.strip().count("\n")) == (2, True, 0), found.err
    with pytest.raises(ConfigError, match=r"speedup must be in 1\.\.3 for 6 layers, got 9"):
        LLM(skipping={"method": "unified_layer_skipping", "speedup": 9})
    with pytest.raises(ConfigError, match="skipping must be left out with exactness='strict'"):
        open_skipping("lora_drop", exactness="strict")
    assert open_skipping(None, exactness="strict") is None
    with pytest.raises(ConfigError, match="kv_selection must be left out beside skipping"):
        LLM(skipping="lora_drop", kv_selection="loopserve")
