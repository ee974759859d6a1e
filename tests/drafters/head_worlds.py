"""A trained head beside its target, step by step, and the texts of engines that draft with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from benchmarks.stand_ins import head_weights
from paceline import LLM, SamplingParams
from paceline.drafters import Context, Drafter, DrafterArgs
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

State = TypeVar("State")
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 500 + 4 for i in range(1 + 14 * j)]} for j in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def head_config(method: Any, info: Any, **more: Any) -> HeadConfig:
    """Layers of three query heads, one of keys; for compiled passes where the target is."""
    layer = {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 40}
    layer["head_dim"] = 32 if info.hidden_size > 32 else 16
    given: dict[str, Any] = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": 300}
    given |= {"layer": layer | {"max_position_embeddings": 64, "rope_theta": 500.0, "rms_norm_eps": 1e-5}}
    return HeadConfig(method=method, **(given | more))


class HeadWorld(Generic[State]):
    """One drafter over a target in float32, with what a plain forward pass needs.

    Whoever derives from it makes the drafter, then calls `start`.
    """

    drafter: Any

    def __init__(self, folder: Path) -> None:
        self.target = load_runner(str(folder), dtype="float32")
        info = self.target.info
        self.args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=self.target)

    def use(self, config: HeadConfig) -> None:
        """A head of this config, whose draft ids are far from the target's."""
        self.config, self.weights = config, head_weights(config)
        if "draft_to_target" in self.weights:
            self.weights["draft_to_target"] = self.weights["draft_to_target"] * 7 + 3

    def start(self, drafter: Drafter, prompt: Sequence[int]) -> None:
        """Let the target read a prompt."""
        self.drafter, self.cache, self.prompt = drafter, self.target.open(), list(prompt)
        self.tokens, self.states = list(prompt), self.extended(prompt[:-1])

    def extended(self, tokens: Sequence[int]) -> torch.Tensor:
        """(n, taps * hidden) the target's states of more tokens."""
        self.taps = self.target.extend([self.cache], [tokens], taps=self.drafter.taps).taps
        return torch.cat([self.taps[layer] for layer in self.drafter.taps], 1)

    def begin(self, **more: Any) -> State:
        """The drafter's state of the prompt."""
        context = Context("a", list(self.prompt), len(self.prompt), taps=self.taps, **more)
        state: State = self.drafter.begin([context])[0]
        return state

    def propose(self, state: State, nodes: int, depth: int = 9) -> TokenTree:
        """Its draft."""
        tree: TokenTree = self.drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])[0]
        return tree

    def commit(self, state: Any, tree: TokenTree, path: Sequence[int], own: int) -> None:
        """A scoring pass of the target, after which the path was accepted."""
        scores = self.target.score([self.cache], [self.tokens[-1]], [tree], taps=self.drafter.taps)
        self.target.commit([self.cache], [path])
        new = [*(int(tree.tokens[i]) for i in path), own]
        rows = [0, *(1 + i for i in path)]
        self.states = torch.cat((self.states, torch.cat([scores.taps[one][rows] for one in self.drafter.taps], 1)))
        self.tokens += new
        state.context.tokens.extend(new)
        self.drafter.observe([state], [tree], [Verdict(tuple(path), tuple(new[:-1]), own)], scores)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding."""
    return torch.allclose(a, b, atol=2e-4, rtol=2e-4)


def outputs(llm: LLM, params: SamplingParams) -> list[Any]:
    """Token ids of the prompts' outputs, for which no drafter was dropped."""
    found = llm.generate(PROMPTS, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


def check_texts(plain: LLM, entry: dict[str, Any]) -> None:
    """The text is the target's: alone, in a list with another drafter, under `auto`; several outputs, rules, seeds."""
    configs: list[dict[str, Any]] = [
        {**entry, "num_speculative_tokens": 4},
        {"method": ["ngram", entry], "num_speculative_tokens": 3},
        {**entry, "controller": "auto"},
    ]
    for given in configs:
        fast = plain.with_speculative_config(given)
        for params in (
            GREEDY,
            SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2),
            SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=12),
        ):
            assert outputs(fast, params) == outputs(plain, params), given
