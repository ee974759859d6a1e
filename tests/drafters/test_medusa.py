"""Medusa heads: what they are by the paper, whatever was trained."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.models.heads import HeadConfig, MedusaHead

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def heads(llm: LLM, **more: int) -> HeadConfig:
    info = llm.runner.info
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": info.vocab_size}
    return HeadConfig(method="medusa", num_heads=3, **(sizes | more))


def test_untrained_heads_predict_the_next_token_and_trained_ones_what_their_weights_say() -> None:
    llm = LLM(dtype="float32")
    config = heads(llm, draft_vocab_size=64, num_layers=2)
    weights = head_weights(config)
    states = torch.randn(5, config.hidden_size)
    next_token = llm.runner.head(states, norm=False)[:, :64]
    untrained = {name: one if name == "draft_to_target" else torch.zeros_like(one) for name, one in weights.items()}
    made = MedusaHead(written_head(config, untrained), llm.runner)
    assert all(torch.allclose(made.logits(states, depth), next_token, atol=1e-4) for depth in range(3))
    made = MedusaHead(written_head(config, weights), llm.runner)
    for depth in range(3):
        x = states
        for block in range(2):
            name = f"heads.{depth}.blocks.{block}"
            x = x + F.silu(F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")))
        found = made.logits(states, depth)
        assert torch.allclose(found, llm.runner.head(x, norm=False)[:, :64], atol=1e-3)
        assert not torch.allclose(found, next_token, atol=1e-1)


def test_the_state_is_that_of_the_token_before_the_root() -> None:
    """Untrained heads draft what the target said of the root, in every step: the root itself."""
    llm = LLM(dtype="float32")
    config = heads(llm)
    untrained = {name: torch.zeros_like(one) for name, one in head_weights(config).items()}
    head = {"method": "medusa", "model": written_head(config, untrained)}
    drafting = llm.with_speculative_config({**head, "controller": "fixed", "num_speculative_tokens": 1})
    prompt = [bundled_prompts()[5].prompt]
    (out,), (plain,) = drafting.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    tokens = list(plain.outputs[0].token_ids)
    assert list(out.outputs[0].token_ids) == tokens
    before = [drafting.tokenizer.encode(prompt[0])[-1], *tokens]
    accepted, at = 0, 0
    while at < len(tokens):
        hit = tokens[at] == before[at] and at + 1 < len(tokens)
        accepted, at = accepted + hit, at + 1 + hit
    assert out.metrics.num_accepted_tokens == accepted
    assert out.metrics.num_draft_tokens > 20
