"""What every drafter of the registry must keep, whatever it does inside. A new drafter is tested on the day it is
registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from acceptance_heads import acceptance_head
from datastores import written
from tools.pairwise import pairwise
from toy_models import ToyModels, nested
from toys import ToyCache, ToyRunner

from benchmarks.stand_ins import adapter_weights, head_weights, written_adapter, written_head, written_rate_adapters
from paceline import registry
from paceline.assembly.build import ExactJudge
from paceline.bench.run import DIAL, dial_registered
from paceline.drafters import Context, DrafterArgs
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict

NAMES = sorted([*registry.DRAFTERS, DIAL])
VOCAB = 11
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
STORE = written(
    [[1, 2, 3, 4, 5, 6], [7, 1, 2, 3, 9], *([i, i + 1, i + 3, i + 4, i + 2] for i in range(6))], shard_tokens=16
)
ADAPTER, MUTE = (written_adapter(adapter_weights(8, mute=mute), 8) for mute in (False, True))
EXIT, TWICE, EVERY = (written_rate_adapters(8, 4, rate, scale=scale) for rate, scale in ((4, 0.0), (2, 0.3), (1, 0.0)))
"""M2R2's adapters at several rates, of which the first and the last ones add nothing."""
LAYER = {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64}
WINDOWED = {"sliding_window": 6}
PARALLEL = {"taps": (0, 1, 3), "num_layers": 2, "mask_token_id": 10}
EAGLES: list[tuple[Any, int, dict[str, Any]]] = [
    ("eagle", VOCAB, {}), ("fspad", 9, {"inner_size": 6}), ("eagle3", 9, {"taps": (0, 1, 3)}), ("p_eagle", 9, PARALLEL),
    ("mtp", VOCAB, {}),
]  # fmt: skip
EAGLE, FSPAD, EAGLE3, P_EAGLE, MTP = (
    written_head(
        HeadConfig(
            method=method,
            hidden_size=8,
            vocab_size=VOCAB,
            draft_vocab_size=tokens,
            layer=LAYER,
            **more,
        ),
        shared=False,
    )
    for method, tokens, more in EAGLES
)
"""Those with 9 tokens draft the first ones alone."""
DOVETAIL_HEAD = HeadConfig(
    method="dovetail", hidden_size=8, vocab_size=VOCAB, draft_vocab_size=9, layer=LAYER, num_layers=2
)
DOVETAIL = written_head(
    DOVETAIL_HEAD,
    {
        name: 0.6 * one if one.is_floating_point() else one
        for name, one in head_weights(DOVETAIL_HEAD, shared=False).items()
    },
)
"""No norm stands before its rows, so that large weights make small roundings large."""
PATHS: list[tuple[Any, int, int, dict[str, Any]]] = [
    ("medusa", VOCAB, 2, {"num_heads": 3}),
    ("hydra", 9, 5, {"num_heads": 3, "num_layers": 2}),
    ("hydra++", VOCAB, 1, {"num_heads": 3, "layer": LAYER}),
    ("clover", 9, 1, {"num_heads": 3, "layer": LAYER}),
    ("chimera", 9, 1, {"num_heads": 3, "layer": LAYER}),
    ("mlp_speculator", VOCAB, 2, {"num_heads": 3, "inner_size": 6, "scale_input": True}),
    ("longspec", 9, 11, {"layer": LAYER, **WINDOWED}),
    ("falcon", 9, 0, {"layer": LAYER, "block_size": 2}),
    ("falcon", VOCAB, 1, {"layer": LAYER, "block_size": 3}),
]
"""Method, tokens that it drafts, a seed with which some of its drafts are accepted, and more of its config."""
MEDUSA, HYDRA, HYDRA_PLUS, CLOVER, CHIMERA, MLP, LONGSPEC, FALCON, FALCON_3 = (
    written_head(own, head_weights(own, shared=False, seed=seed))
    for own, seed in (
        (HeadConfig(method=name, hidden_size=8, vocab_size=VOCAB, draft_vocab_size=tokens, **more), seed)
        for name, tokens, seed, more in PATHS
    )
)
PPD, PPD_MEANS = (
    written_head(
        HeadConfig(
            method="ppd", hidden_size=8, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3, virtual_tokens=copies
        )
    )
    for copies in (1, 2)
)
LUD = written_head(
    HeadConfig(
        method="lud", hidden_size=8, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3, mask_token_id=VOCAB - 1
    )
)
TRANSFER = written_head(
    HeadConfig(
        method="hidden_transfer", hidden_size=8, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3, taps=(0, 1, 1)
    )
)
BLOCK = {"layer": LAYER, "taps": (0, 2), "num_layers": 2, "block_size": 4, "mask_token_id": 6}
MARKOV = {"markov_rank": 3, "enable_confidence_head": True, "confidence_head_with_markov": True}
BLOCKS: list[tuple[Any, int, int, dict[str, Any]]] = [
    ("dflash", VOCAB, 7, BLOCK),
    ("dspark", 9, 0, BLOCK | MARKOV | {"sample_from_anchor": True}),
    ("dspark", VOCAB, 0, BLOCK | MARKOV | {"markov_head_type": "rnn"}),
]
DFLASH, DSPARK, DSPARK_RNN = (
    written_head(own, head_weights(own, shared=False, seed=seed))
    for own, seed in (
        (HeadConfig(method=name, hidden_size=8, vocab_size=VOCAB, draft_vocab_size=tokens, **more), seed)
        for name, tokens, seed, more in BLOCKS
    )
)
ACCEPTANCE = str(acceptance_head(hidden=8, seed=2).write(Path(mkdtemp(prefix="paceline-head-")) / "head"))
"""An acceptance head of the toy draft model."""
HEADS = (
    *(MEDUSA, HYDRA, HYDRA_PLUS, CLOVER, CHIMERA, PPD, PPD_MEANS, MLP, EAGLE, FSPAD, EAGLE3, P_EAGLE, LONGSPEC, MTP),
    *(DFLASH, DSPARK, DSPARK_RNN, TRANSFER, FALCON, FALCON_3, DOVETAIL, LUD),
)
STAND_INS = (ACCEPTANCE, ADAPTER, MUTE, EXIT, TWICE, EVERY, *HEADS)
PREDICTION = [3, 4, 1, 2, 5, 6, 7, 3, 99, 1, 2, 8, 9, 10, 0, 1, 2, 3]
RECORD = {tuple(PROMPT): [3, 4, 1, 2, 3, 4, 5, 6]}
TENANTS = ("", "tenant 0", "tenant 1")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "ngram": [{}, {"prompt_lookup_min": 2, "prompt_lookup_max": 3}, {"num_speculative_tokens": 2}],
    "suffix": [
        {},
        {"suffix_decoding_use_tree_spec": True, "suffix_decoding_max_spec_factor": 2.0},
        {"suffix_decoding_cache_prompts": True, "suffix_decoding_max_tree_depth": 6, "num_speculative_tokens": 2},
        {"suffix_decoding_max_cached_requests": 0},
    ],
    "draft_model": [
        {"model": "toy"},
        {"model": "toy", "tree_width": 3},
        {"model": "toy", "tree_policy": "dyspec"},
        {"model": "toy", "tree_policy": "dyspec_threshold"},
        {"model": "toy", "tree_policy": "eagle2", "tree_width": 4},
        {
            "model": "toy",
            "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]",
        },
        {"model": "toy", "tree_policy": "ppd"},
        {"model": "toy", "tree_policy": "rsd_c", "tree_width": 2},
        {"model": "toy", "tree_policy": "rsd_s"},
        {"model": "toy", "tree_policy": "spectr"},
        {"model": "toy", "tree_policy": "greedy_draft"},
        {"model": "toy", "draft_sample_method": "greedy"},
        {"model": "toy", "num_speculative_tokens": 2},
        {"model": "toy", "acceptance_head": ACCEPTANCE},
    ],
    "encdec_draft": [
        {"model": "toy"},
        {"model": "toy", "tree_width": 3},
        {"model": "toy", "tree_policy": "dyspec"},
        {"model": "toy", "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "pearl": [
        {"model": "toy", "overlap": True},
        {"model": "toy", "overlap": False, "num_speculative_tokens": 3},
        {"model": "toy", "draft_sample_method": "greedy"},
    ],
    "quantized_copy": [
        {},
        {"quantization": "int4", "tree_width": 3},
        {"quantization": "int4_weight_only", "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "specmquant": [
        {"model": "toy"},
        {},
        {
            "draft": {"method": "draft_model", "model": "toy", "tree_width": 2},
            "min_draft_length": 2,
            "draft_nodes": 5,
            "draft_depth": 2,
        },
        {"model": "toy", "intermediate_model": "toy", "min_draft_length": 1, "num_speculative_tokens": 3},
    ],
    "s2d": [
        {"model": "toy", "draft_exit_thresholds": 0.5},
        {"model": "toy", "draft_exits": [1, 2], "draft_exit_thresholds": [0.4, 0.7], "num_speculative_tokens": 3},
        {"model": "toy", "draft_exits": [2], "draft_exit_thresholds": 0.6, "draft_sample_method": "greedy"},
        {"model": "toy", "draft_exits": [1, 3], "draft_exit_thresholds": 0.4, "tree_width": 3},
    ],
    "easyspec": [
        {"model": "toy"},
        {"model": "toy", "layer_group_size": 1, "num_speculative_tokens": 3},
        {"model": "toy", "tree_width": 3},
        {"model": "toy", "tree_policy": "dyspec", "layer_group_size": 2},
        {"model": "toy", "draft_sample_method": "greedy"},
    ],
    "pard": [
        {"model": "toy"},
        {"model": "toy", "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "diffuspec": [
        {"model": "toy"},
        {"model": "toy", "path_weight": 1.0, "max_candidates": 1, "path_beam": 1, "num_speculative_tokens": 3},
        {"model": "toy", "path_weight": 0.0, "candidate_mass": 1.0, "path_beam": 5, "draft_context": 4},
    ],
    "deer": [
        {"model": "toy"},
        {"model": "toy", "draft_max_length": 3, "draft_masks": 0, "draft_context": 5},
        {"model": "toy", "draft_sample_method": "greedy", "separator_token_id": 4},
    ],
    "tli": [
        {"model": "other"},
        {"model": "other", "tree_width": 3},
        {"model": "other", "tree_policy": "eagle2", "tree_width": 4},
        {"model": "other", "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "slem": [{"model": "other"}, {"model": "other", "num_speculative_tokens": 2}],
    "rest": [
        {"datastore": STORE},
        {"datastore": STORE, "min_match_length": 1, "max_matches": 5, "num_speculative_tokens": 2},
    ],
    "rasd": [{"datastore": STORE}, {"datastore": STORE, "prune_top_k": 0}],
    "aded": [
        {},
        {"table_rows": 8, "table_width": 2},
        {"simulations": 20, "exploration": 0.0, "num_speculative_tokens": 2},
    ],
    "layer_skip": [
        {},
        {"exit_layer": 2, "num_speculative_tokens": 3, "resume_verification": True},
        {"assistant_early_exit": 3, "draft_sample_method": "greedy"},
        {"target_speedup": 2.0},
    ],
    "swift": [
        {},
        {"draft_stop_threshold": 0.0, "context_window": 1, "bayes_every": 2, "skip_ratio": 0.5},
        {"draft_stop_threshold": 0.0, "tree_width": 3},
        {
            "skip_ratio": 1.0,
            "draft_stop_threshold": 0.3,
            "context_window": 2,
            "num_speculative_tokens": 3,
            "draft_sample_method": "greedy",
        },
    ],
    "del": [
        {},
        {"shadow_every": 1, "exit_layers": [2, 3], "num_speculative_tokens": 2, "dynamic_draft_exit": False},
    ],
    "kangaroo": [
        {"model": MUTE, "draft_stop_threshold": 0.0},
        {"model": ADAPTER, "exit_layer": 3, "draft_stop_threshold": 0.1, "draft_sample_method": "greedy"},
        {"model": ADAPTER, "exit_layer": 1, "draft_max_length": 2, "num_speculative_tokens": 3},
    ],
    "m2r2": [
        {"model": EXIT},
        {"model": TWICE, "num_speculative_tokens": 2},
        {"model": EVERY, "draft_sample_method": "greedy"},
    ],
    "medusa": [
        {"model": MEDUSA},
        {"model": MEDUSA, "tree_width": 3},
        {"model": MEDUSA, "tree_policy": "dyspec", "num_speculative_tokens": 2},
        {"model": MEDUSA, "draft_sample_method": "greedy"},
        {"model": MEDUSA, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    ],
    "hydra": [
        {"model": HYDRA},
        {"model": HYDRA, "tree_width": 3},
        {"model": HYDRA, "tree_policy": "dyspec"},
        {"model": HYDRA, "draft_sample_method": "greedy", "num_speculative_tokens": 2},
        {"model": HYDRA, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    ],
    "hydra++": [
        {"model": HYDRA_PLUS},
        {"model": HYDRA_PLUS, "tree_policy": "eagle2", "tree_width": 3},
        {"model": HYDRA_PLUS, "tree_policy": "rsd_s", "draft_context": None},
    ],
    "clover": [
        {"model": CLOVER},
        {"model": CLOVER, "tree_width": 3, "draft_context": None},
        {"model": CLOVER, "tree_policy": "rsd_s", "num_speculative_tokens": 2},
    ],
    "chimera": [
        {"model": CHIMERA},
        {"model": CHIMERA, "tree_width": 3, "draft_context": None},
        {"model": CHIMERA, "tree_policy": "dyspec"},
        {"model": CHIMERA, "tree_policy": "rsd_s", "num_speculative_tokens": 2},
    ],
    "ppd": [
        {"model": PPD},
        {"model": PPD, "tree_width": 3},
        {"model": PPD_MEANS, "tree_policy": "ppd", "prompt_rows": 7},
        {"model": PPD, "tree_policy": "rsd_s", "num_speculative_tokens": 2},
        {"model": PPD, "draft_sample_method": "greedy", "prompt_rows": 5},
    ],
    "lud": [
        {"model": LUD},
        {"model": LUD, "tree_width": 3, "placeholder_rows": 7},
        {"model": LUD, "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "hidden_transfer": [
        {"model": TRANSFER},
        {"model": TRANSFER, "tree_width": 3, "pseudo_rows": 4},
        {"model": TRANSFER, "tree_policy": "dyspec", "num_speculative_tokens": 2},
    ],
    "mlp_speculator": [
        {"model": MLP},
        {"model": MLP, "tree_width": 3, "num_speculative_tokens": 2},
        {"model": MLP, "tree_policy": "rsd_c", "tree_width": [2, 2, 1]},
    ],
    "eagle": [
        {"model": EAGLE},
        {"model": EAGLE, "tree_width": 3, "draft_context": None},
        {"model": EAGLE, "tree_policy": "dyspec", "num_speculative_tokens": 3},
        {"model": EAGLE, "draft_sample_method": "greedy"},
        {"model": EAGLE, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    ],
    "eagle2": [{"model": EAGLE}, {"model": EAGLE, "tree_width": 2, "num_speculative_tokens": 2}],
    "fspad": [
        {"model": FSPAD},
        {"model": FSPAD, "tree_width": 2, "num_speculative_tokens": 2, "draft_context": None},
        {"model": FSPAD, "tree_policy": "rsd_s"},
    ],
    "eagle3": [
        {"model": EAGLE3},
        {"model": EAGLE3, "tree_policy": "eagle2", "tree_width": 3},
        {"model": EAGLE3, "tree_policy": "rsd_s"},
    ],
    "dovetail": [{"model": DOVETAIL}, {"model": DOVETAIL, "tree_policy": "rsd_s", "num_speculative_tokens": 2}],
    "p_eagle": [
        {"model": P_EAGLE},
        {"model": P_EAGLE, "tree_width": 3, "draft_context": None},
        {"model": P_EAGLE, "tree_policy": "rsd_s"},
        {"model": P_EAGLE, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    ],
    "longspec": [
        {"model": LONGSPEC},
        {"model": LONGSPEC, "tree_width": 3},
        {"model": LONGSPEC, "tree_policy": "rsd_s"},
        {"model": LONGSPEC, "tree_policy": "eagle2", "tree_width": 3},
        {"model": LONGSPEC, "draft_sample_method": "greedy", "num_speculative_tokens": 2},
    ],
    "falcon": [
        {"model": FALCON},
        {"model": FALCON, "tree_width": 3, "draft_context": None},
        {"model": FALCON_3, "tree_policy": "rsd_s"},
        {"model": FALCON_3, "tree_policy": "dyspec", "num_speculative_tokens": 4},
        {"model": FALCON, "draft_sample_method": "greedy"},
        {"model": FALCON, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    ],
    "mtp": [{"model": MTP}, {"model": MTP, "tree_policy": "eagle2", "tree_width": 3}],
    "dflash": [
        {"model": DFLASH},
        {"model": DFLASH, "tree_width": 3, "draft_context": None},
        {"model": DFLASH, "tree_policy": "dyspec", "num_speculative_tokens": 2},
        {"model": DFLASH, "draft_sample_method": "greedy"},
    ],
    "dspark": [
        {"model": DSPARK},
        {"model": DSPARK, "tree_policy": "rsd_c", "tree_width": [2, 2, 1], "confidence_threshold": 0.2},
        {"model": DSPARK_RNN, "confidence_threshold": 0.1},
        {"model": DSPARK_RNN, "tree_policy": "dyspec", "confidence_threshold": 0.2},
        {"model": DSPARK_RNN, "tree_policy": "eagle2", "tree_width": 3},
    ],
    "copyspec": [{}, {"copyspec_gamma": 2, "num_speculative_tokens": 2}, {"copyspec_gamma": 1}],
    "token_recycling": [{}, {"num_speculative_tokens": 2}],
    "prediction": [{}, {"num_speculative_tokens": 2}],
    "corrupted_oracle": [
        {"continuations": RECORD, "acceptance": 0.6},
        {"continuations": RECORD, "acceptance": 0.6, "spread": 1.0, "num_speculative_tokens": 3},
        {"continuations": RECORD, "acceptance": 0.4, "tree_width": 3},
        {"continuations": RECORD, "acceptance": 0.4, "tree_policy": "dyspec"},
        {"continuations": RECORD, "acceptance": 0.4, "tree_policy": "dyspec_threshold", "spread": 1.0},
        {
            "continuations": RECORD,
            "acceptance": 0.4,
            "tree_policy": "eagle2",
            "spread": 0.5,
            "num_speculative_tokens": 4,
        },
        {
            "continuations": RECORD,
            "acceptance": 0.4,
            "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]",
        },
        {"continuations": RECORD, "acceptance": 0.4, "tree_policy": "ppd"},
    ],
}
CASES = [(name, options) for name in NAMES for options in VARIANTS.get(name, [{}])]


@pytest.fixture(autouse=True)
def _dial() -> Iterator[None]:
    """The acceptance dial keeps the contract too."""
    with dial_registered():
        yield


@dial_registered()
def remembers(name: str) -> bool:
    """Whether what it proposes depends on more than the text: on its own earlier trees, or on other requests."""
    drafter = registry.load("drafters", name)
    return bool(drafter.keeps_trajectory or drafter.shares_state)


def named(options: dict[str, Any]) -> str:
    """The options for a test's name, without what differs from run to run."""
    return str([(key, "..." if key == "datastore" or value in STAND_INS else value) for key, value in options.items()])


def over(cases: Sequence[tuple[str, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(("name", "options"), cases, ids=lambda v: v if isinstance(v, str) else named(v))


each_drafter, each_of_the_text = over(CASES), over([case for case in CASES if not remembers(case[0])])


class World:
    """One drafter over toy models, with the sequences that it serves."""

    def __init__(self, name: str, options: dict[str, Any], *, pad: int = 0, temperature: float = 0.0) -> None:
        self.target = ToyRunner(VOCAB, seed=3)
        self.draft = ToyRunner(VOCAB, order=None, seed=3, noise=1.0, pad=pad)
        self.temperature = temperature
        self.models = ToyModels(self.target, self.draft)
        args = DrafterArgs(
            vocab_size=VOCAB,
            index=2,
            max_context=4096,
            target=self.target,
            load_runner=lambda name: self.draft,
            models=self.models,
            nested=lambda config: nested(config, args),
            judge=ExactJudge(),
        )
        self.drafter = registry.load("drafters", name)(args, **options)
        for tenant in TENANTS if self.drafter.shares_state else ():
            self.teach(tenant)

    def context(self, tokens: Sequence[int], seed: int = 5, tenant: str = "") -> Context:
        given = min(len(tokens), len(PROMPT))
        text = list(tokens)
        return Context(
            f"r{seed}",
            text,
            given,
            self.temperature,
            seed,
            tenant=tenant,
            taps={
                layer: self.hidden(layer, [text[:end] for end in range(1, len(text))]) for layer in self.drafter.taps
            },
            prediction=PREDICTION,
            forced=lambda most: [(token, 1.0) for token in PREDICTION[len(text) - given :][:most]],
            cache=lambda: ToyCache(text[:-1]),
        )

    def hidden(self, layer: int, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """(texts, hidden) the target's states of each text's last token."""
        return torch.stack([self.target.hidden(layer, text) for text in texts])

    def teach(self, tenant: str) -> None:
        """One request whose scored rows leave something of every token with the tenant."""
        state, tree = self.begin(PROMPT, tenant=tenant), TokenTree.chain(range(VOCAB))
        state.context.tokens.append(0)
        rows = torch.stack([self.target.logits([token]) for token in (PROMPT[-1], *range(VOCAB))])
        self.drafter.observe([state], [tree], [Verdict((), (), 0)], Scores(rows, (0, len(rows))))
        self.drafter.end([state])

    def begin(self, tokens: Sequence[int], seed: int = 5, tenant: str = "") -> Any:
        (state,) = self.drafter.begin([self.context(tokens, seed, tenant)])
        return state

    def propose(self, states: Sequence[Any], nodes: int = 7, depth: int = 5) -> list[TokenTree]:
        return self.drafter.propose(states, [Budget(nodes, depth)] * len(states), [EMPTY_TREE] * len(states))

    def observe(self, state: Any, tree: TokenTree, verdict: Verdict) -> None:
        tokens, text = tree.tokens.tolist(), list(state.context.tokens)
        if self.drafter.adds_rows:
            added = self.drafter.added_rows([state], [tree], [self.drafter.rows_beside(1 + len(tree))])
            _, said = self.target.score_added([ToyCache(text[:-1])], text[-1:], [tree], added)
            self.drafter.read_rows([state], [said.logits])
        texts = [text, *([*text, *(tokens[i] for i in tree.path(node))] for node in range(len(tree)))]
        state.context.tokens.extend(verdict.tokens)
        rows = self.target.logits([0]).repeat(1 + len(tree), 1)
        taps = {layer: self.hidden(layer, texts) for layer in self.drafter.taps}
        self.drafter.observe([state], [tree], [verdict], Scores(rows, (0, 1 + len(tree)), taps))


def same(a: TokenTree, b: TokenTree) -> bool:
    return all(np.array_equal(getattr(a, c), getattr(b, c)) for c in ("tokens", "parents", "sources")) and bool(
        np.allclose(a.confidence, b.confidence)
    )


def verdict_of(tree: TokenTree, accept: int, branch: int, next_token: int) -> Verdict:
    """Accept up to `accept` nodes on the way to leaf number `branch`."""
    leaves = tree.leaves()
    path = tree.path(leaves[branch % len(leaves)])[:accept] if leaves else ()
    return Verdict(path, tuple(int(tree.tokens[i]) for i in path), next_token)


SITUATIONS = list(pairwise({"nodes": (1, 7), "temperature": (0.0, 1.0), "pad": (0, 5, -3)}))
"""Budgets, temperatures and how many tokens the draft's vocabulary has more than the target's, in all pairs."""


@each_drafter
def test_trees_fit_the_budget_and_the_vocabulary(name: str, options: dict[str, Any]) -> None:
    for situation in SITUATIONS:
        nodes, temperature = situation["nodes"], situation["temperature"]
        world = World(name, options, pad=situation["pad"], temperature=temperature)
        for depth in (1, 3):
            (tree,) = world.propose([world.begin(PROMPT)], nodes, depth)
            tree.check(VOCAB, nodes)
            assert tree.max_depth <= depth, situation
            assert set(tree.sources.tolist()) <= {2}, situation
            for parent in (-1, *range(len(tree))):
                assert sum(float(tree.confidence[i]) for i in tree.children(parent)) <= 1.0 + 1e-5, situation
                drawn = any(trial.drawn for trial in tree.trials_of(parent))
                assert not drawn or (temperature > 0 and world.drafter.draws_tokens), situation
        assert world.propose([world.begin(PROMPT)], 0, 3) == [EMPTY_TREE], situation


@each_drafter
def test_go_on_stops_the_draft(name: str, options: dict[str, Any]) -> None:
    """A drafter that drafts level by level asks before each level but the first; others need not."""
    world = World(name, options)
    depths: list[int] = []

    def go_on(depth: int, confidence: float, features: object) -> bool:
        assert 0.0 <= confidence <= 1.0
        depths.append(depth)
        return depth < 2

    (tree,) = world.drafter.propose([world.begin(PROMPT)], [Budget(7, 5, go_on)], [EMPTY_TREE])
    assert not depths or (depths[0] == 2 and tree.max_depth == 1)


def check_separation(name: str, options: dict[str, Any], temperature: float, tenants: Sequence[str]) -> None:
    """Two sequences at once get the trees that each gets when it is the only one asked."""
    together, alone = World(name, options, temperature=temperature), World(name, options, temperature=temperature)
    texts = [PROMPT, [5, 6, 5, 6, 7, 5, 6]]
    states = together.drafter.begin([together.context(text, seed, tenants[seed]) for seed, text in enumerate(texts)])
    single = [alone.begin(text, seed, tenants[seed]) for seed, text in enumerate(texts)]
    for step in range(4):
        trees = together.propose(states, nodes=40)
        for i, tree in enumerate(trees):
            (expected,) = alone.propose([single[i]], nodes=40)
            assert same(tree, expected)
            verdict = verdict_of(tree, (step + i) % 3, i, (step + 2 * i) % VOCAB)
            together.observe(states[i], tree, verdict)
            alone.observe(single[i], expected, verdict)


@each_drafter
def test_two_sequences_do_not_influence_each_other(name: str, options: dict[str, Any]) -> None:
    """Those of two tenants never do; those of one tenant may where the drafter says that it `shares_state`."""
    shares_state = registry.load("drafters", name).shares_state
    for temperature in (0.0, 1.0):
        check_separation(name, options, temperature, TENANTS[1:] if shares_state else TENANTS[:1] * 2)


@pytest.mark.parametrize("options", [{}, {"shared_tables": True}])
def test_the_separation_check_catches_a_table_that_two_sequences_share(options: dict[str, Any]) -> None:
    """Negative control: in one tenant, or with one table for all, what one sequence teaches shows in the other."""
    with pytest.raises(AssertionError):
        check_separation("token_recycling", options, 0.0, TENANTS[1:] if options else TENANTS[:1] * 2)


def check_freshness(name: str, options: dict[str, Any], accept: int, branch: int) -> None:
    """After verdicts that accept up to `accept` nodes of leaf number `branch`, the state proposes what a fresh one
    does.
    """
    world = World(name, options)
    state = world.begin(PROMPT)
    (tree,) = world.propose([state])
    for step in range(4):
        world.observe(state, tree, verdict_of(tree, accept, branch, step % VOCAB))
        fresh = world.begin(state.context.tokens)
        (tree,) = world.propose([state])
        assert same(tree, world.propose([fresh])[0]), (accept, branch)
        world.drafter.end([fresh])


@each_of_the_text
def test_after_any_verdict_the_state_is_that_of_a_fresh_one(name: str, options: dict[str, Any]) -> None:
    for accept, branch in ((0, 0), (1, 1), (2, 0), (2, 1), (9, 0), (9, 1)):  # without a node accepted, no branch counts
        check_freshness(name, options, accept, branch)


@each_of_the_text
def test_tokens_of_others_and_steps_without_drafts_are_caught_up(name: str, options: dict[str, Any]) -> None:
    """The accepted path may be another drafter's, the target's token may be one that was drafted, and drafts may be
    skipped.
    """
    world = World(name, options)
    state = world.begin(PROMPT)
    rng = np.random.default_rng(0)
    for step in range(8):
        (tree,) = world.propose([state], nodes=0 if step % 4 == 3 else 7)
        other = TokenTree.chain([int(t) for t in rng.integers(0, VOCAB, 3)])
        scored = other if step % 2 else tree
        first = scored.path(scored.leaves()[0])[: step % 3] if len(scored) else ()
        own = int(tree.tokens[0]) if len(tree) and not step % 2 else int(rng.integers(VOCAB))
        world.observe(state, scored, Verdict(first, tuple(int(scored.tokens[i]) for i in first), own))
        fresh = world.begin(state.context.tokens)
        assert same(world.propose([state])[0], world.propose([fresh])[0])
        world.drafter.end([fresh])


@each_of_the_text
def test_a_long_gap_is_caught_up(name: str, options: dict[str, Any]) -> None:
    world = World(name, options)
    state = world.begin(PROMPT)
    world.propose([state])
    state.context.tokens.extend(
        int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 1100)
    )  # more than two chunks
    if world.drafter.taps:  # the target's states of these tokens are lost
        assert world.propose([state]) == [EMPTY_TREE]
        return
    assert same(world.propose([state])[0], world.propose([world.begin(state.context.tokens)])[0])


@each_drafter
def test_asking_twice_gives_the_same_tree_and_leaves_the_context_alone(name: str, options: dict[str, Any]) -> None:
    world = World(name, options, temperature=1.0)
    state = world.begin(PROMPT)
    assert same(world.propose([state])[0], world.propose([state])[0])
    assert state.context.tokens == PROMPT


@each_drafter
def test_forks_go_their_own_ways_and_nothing_leaks(name: str, options: dict[str, Any]) -> None:
    world = World(name, options)
    state = world.begin(PROMPT)
    (tree,) = world.propose([state])
    twin = world.drafter.fork(state, world.context(PROMPT, seed=9))
    assert same(world.propose([twin])[0], tree)
    world.observe(state, tree, Verdict((), (), 7))
    (then,) = world.propose([state])
    world.observe(twin, tree, Verdict((), (), 3))
    assert same(world.propose([state])[0], then)
    for one in () if remembers(name) else (state, twin):
        assert same(world.propose([one])[0], world.propose([world.begin(one.context.tokens)])[0])
    world = World(name, options)
    states = [world.begin(PROMPT), world.begin(PROMPT)]
    states.append(world.drafter.fork(states[0], world.context(PROMPT)))
    world.propose(states)
    world.drafter.end(states)
    assert world.draft.open_caches == world.target.open_caches == world.models.other.open_caches == 0
    assert world.models.exits.open_caches == world.models.groups.open_caches == 0


def test_the_freshness_check_catches_a_state_that_keeps_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a draft cache that is never cut back after a rejection fails the check above."""
    from paceline.drafters.common.draft_state import DraftState

    def careless(self: DraftState, runner: Any) -> None:
        self.base, self.ahead = min(self.cache.length, len(self.context.tokens) - 1), []

    monkeypatch.setattr(DraftState, "confirm", careless)
    with pytest.raises(AssertionError):
        check_freshness("draft_model", {"model": "toy"}, 1, 0)
