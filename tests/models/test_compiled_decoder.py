"""Compiled passes against PyTorch's operators and transformers, and the promise that a row's bits depend on its text
alone.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from numba import njit
from tiny_llama import CPU, close, oracle, runner_of, spec_of, stepwise, tiny_llama, tokens, weights_of, whole_pass

from paceline.checkpoints import dequantized, quantize, targets
from paceline.models import LatentSpec, LayerSpec, MoeSpec, RopeSpec
from paceline.models.cpu import compilation
from paceline.models.cpu import threads as team
from paceline.models.cpu.matrix import pack
from paceline.models.cpu.pages import SLAB, Pages, zeros
from paceline.models.cpu.processor import has_bfloat
from paceline.models.cpu.tiles import DOT, FULL, HALF
from paceline.models.cpu.vectors import exponential, load, store
from paceline.models.passes import EagerPasses, compiled_decoder, eligibility, self_test
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner, native, what_varies
from paceline.tree import EMPTY_TREE, TokenTree

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72}
IDS = tokens(150)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
KINDS = [(torch.float32, FULL), (torch.bfloat16, HALF), *([(torch.bfloat16, DOT)] if has_bfloat() else [])]
in_each_kind = pytest.mark.parametrize(("dtype", "kind"), KINDS)


def compiled_runner(dtype=torch.float32, **kwargs) -> NativeRunner:
    runner = runner_of(tiny_llama(**WIDE).to(dtype), cache_slots=64, **kwargs)
    assert isinstance(runner.passes, CompiledDecoder)
    return runner


@pytest.fixture
def of_kind(monkeypatch):
    """A runner whose products are of one kind."""

    def make(dtype, kind, **kwargs):
        monkeypatch.setattr(compiled_decoder, "best_kind", lambda _, **__: kind)
        return compiled_runner(dtype, **kwargs)

    return make


@in_each_kind
def test_the_self_test_passes_and_could_fail(dtype, kind, monkeypatch):
    assert self_test.agrees(dtype, kind)
    right = self_test.expected
    monkeypatch.setattr(self_test, "expected", lambda weights, ids: right(weights, [*ids[:4], ids[4] ^ 1, *ids[5:]]))
    assert not self_test.agrees(dtype, kind)


def test_float32_is_that_of_transformers():
    runner, want = compiled_runner(), oracle(tiny_llama(**WIDE), IDS)
    assert close(whole_pass(runner, IDS), want)
    assert close(stepwise(runner, IDS), want)
    assert not close(whole_pass(runner, [IDS[0] ^ 1, *IDS[1:]]), want)


@pytest.mark.parametrize("kind", [kind for dtype, kind in KINDS if dtype is torch.bfloat16])
def test_bfloat16_errs_no_more_than_the_operators(of_kind, kind):
    model = tiny_llama(**WIDE).to(torch.bfloat16)
    exact = oracle(tiny_llama(**WIDE).to(torch.bfloat16).double(), IDS)
    ours, operators = of_kind(torch.bfloat16, kind), runner_of(model, compiled=False)
    assert isinstance(operators.passes, EagerPasses)
    errors = [float((whole_pass(runner, IDS).double() - exact).abs().mean()) for runner in (ours, operators)]
    assert 0 < errors[0] < 1.05 * errors[1]


@in_each_kind
def test_a_row_has_the_same_bits_however_the_text_is_fed(of_kind, dtype, kind):
    runner = of_kind(dtype, kind)
    plain = stepwise(runner, IDS)
    assert torch.equal(whole_pass(runner, IDS), plain)
    for width in range(2, 17):
        assert torch.equal(stepwise(runner, IDS, width), plain), width
    assert not torch.equal(plain[1:], plain[:-1])


@in_each_kind
def test_a_row_has_the_same_bits_whatever_stands_beside_it(of_kind, dtype, kind):
    runner = of_kind(dtype, kind)
    caches = [runner.open() for _ in range(16)]
    runner.extend(caches, [IDS[i : i + 5 + 2 * i] for i in range(16)])
    roots = [3 + i for i in range(16)]
    alone = [runner.score([cache], [root], [EMPTY_TREE]).logits for cache, root in zip(caches, roots, strict=True)]
    for count in range(1, 17):
        rows = runner.score(caches[:count], roots[:count], [EMPTY_TREE] * count).logits
        assert torch.equal(rows, torch.cat(alone[:count])), count
    shifted = runner.score(caches, [*roots[1:], 3], [EMPTY_TREE] * 16).logits
    assert not torch.equal(shifted[:1], alone[0])


@in_each_kind
@pytest.mark.parametrize("windows", [(), (8,), (24, None)])
def test_tree_rows_and_moved_entries_have_the_bits_of_plain_decoding(of_kind, dtype, kind, windows):
    runner = of_kind(dtype, kind, windows=windows)
    cache = runner.open()
    runner.extend([cache], [IDS[:40]])
    rows = runner.score([cache], IDS[40:41], [TREE]).logits
    for node in range(len(TREE)):
        path = [int(TREE.tokens[i]) for i in TREE.path(node)]
        assert torch.equal(rows[1 + node], whole_pass(runner, [*IDS[:41], *path])[-1])
    runner.commit([cache], [(1, 3, 5)])
    kept = [*IDS[:41], 6, 8, 5]
    after = runner.score([cache], [9], [EMPTY_TREE]).logits
    assert torch.equal(after, whole_pass(runner, [*kept, 9])[-1:])
    assert not torch.equal(after, whole_pass(runner, [*kept[:-1], 6, 9])[-1:])


@in_each_kind
def test_one_thread_gives_the_bits_of_two(of_kind, dtype, kind, monkeypatch):
    before = torch.get_num_threads()
    runner = of_kind(dtype, kind)
    rows = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(whole_pass(runner, IDS[:70]))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(compiled_decoder, "find_team", lambda: None)
    rows.append(whole_pass(of_kind(dtype, kind), IDS[:70]))
    assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_more_rows_than_a_pass_holds():
    runner = compiled_runner()
    tree = TokenTree.build([i % 60 for i in range(100)], [-1, -1, *(i // 2 for i in range(98))])
    caches = [runner.open() for _ in range(3)]
    ids = [IDS[:70], IDS[:3], IDS[:50]]
    runner.extend(caches, ids)
    scores = runner.score(caches, [1, 2, 3], [tree, EMPTY_TREE, tree], taps=(0,))
    assert scores.rows == (0, 101, 102, 203)
    for i, root, node in ((0, 1, 99), (0, 1, 64), (1, 2, None), (2, 3, 7), (2, 3, 98)):
        path = [] if node is None else [int(tree.tokens[j]) for j in tree.path(node)]
        alone = runner.extend([runner.open()], [[*ids[i], root, *path]], taps=(0,))
        row = scores.rows[i] + (0 if node is None else 1 + node)
        assert torch.equal(scores.logits[row], alone.logits[0])
        assert torch.equal(scores.taps[0][row], alone.taps[0][-1])


LATENT = {
    "latent": LatentSpec(rank=64, nope=32, rope=32, value=128),
    "num_kv_heads": 1,
    "head_dim": 96,
    "attention_scale": 0.5,
}
MIXED_LAYERS = (LayerSpec(moe=True), LayerSpec(), LayerSpec(moe=True))
FEATURES = {
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "normed heads": {"qk_norm": "head"},
    "heads normed when they are rotated": {"qk_norm": "head", "qk_norm_rotated": True},
    "gelu": {"activation": "gelu_tanh"},
    "norms stored as w - 1": {"norm_offset": True},
    "multipliers": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logit_multiplier": 0.25,
        "attention_scale": 0.3,
    },
    "rotation of a part": {"head_dim": 64, "ropes": {"default": RopeSpec(theta=10000.0, dims=32)}},
    "queries that grow": {"ropes": {"default": RopeSpec(theta=10000.0, dims=32, growth=(2.0, 8))}},
    "no rotation": {"layers": (LayerSpec(rope=None), LayerSpec(), LayerSpec(rope=None))},
    "one kv head": {"num_kv_heads": 1},
    "three kv heads": {"num_kv_heads": 3, "num_heads": 3},
    "many heads per kv head": {"num_kv_heads": 1, "num_heads": 6},
    "tied": {"tied": True},
    "odd vocabulary": {"vocab_size": 71},
    "odd inner width": {"intermediate_size": 88},
    "gelu of the error function": {"activation": "gelu"},
    "norms behind sub-layers": {"norm_placement": "post"},
    "norms before and behind": {"norm_placement": "sandwich", "residual_multiplier": 0.5},
    "norms of all heads": {"qk_norm": "full"},
    "soft caps": {"attention_softcap": 0.5, "logit_softcap": 0.5},
    "layer norms": {"norm": "layer"},
    "layer norms with bias, on all sides": {"norm": "layer", "norm_bias": True, "norm_placement": "sandwich"},
    "no gate": {"gated": False, "activation": "gelu_tanh", "mlp_bias": True},
    "no gate, odd inner width": {"gated": False, "activation": "silu", "intermediate_size": 88},
    "attention and MLP side by side": {"parallel": True, "norm": "layer"},
    "attention sinks": {"attention_sinks": True, "num_kv_heads": 2, "num_heads": 4, "attention_scale": 0.3},
    "xielu": {"gated": False, "activation": "xielu"},
    "clamped gate": {"activation": "clamped_swiglu", "swiglu_limit": 0.5},
    "latent attention": LATENT,
    "latent attention of queries": LATENT
    | {"latent": replace(LATENT["latent"], query_rank=96), "attention_scale": 0.3},
    "experts with biases": {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, bias=True),
        "layers": MIXED_LAYERS,
        "activation": "clamped_swiglu",
        "attention_sinks": True,
    },
    "experts": {"moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True), "layers": MIXED_LAYERS},
    "many experts": {"moe": MoeSpec(experts=70, top_k=8, intermediate=96, norm_top_k=False), "layers": MIXED_LAYERS},
    "experts and norms": {
        "moe": MoeSpec(experts=4, top_k=3, intermediate=32, norm_top_k=False),
        "layers": MIXED_LAYERS,
        "norm_placement": "sandwich",
    },
    "an MLP beside experts": {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, shared=24),
        "layers": MIXED_LAYERS,
    },
    "an MLP beside experts, behind a gate": {  # which is the router's output 65, in a strip of its own
        "moe": MoeSpec(experts=64, top_k=4, intermediate=32, norm_top_k=False, shared=136, shared_gate=True),
        "layers": MIXED_LAYERS,
        "norm_placement": "sandwich",
    },
    "groups of experts": {
        "moe": MoeSpec(experts=12, top_k=3, intermediate=40, norm_top_k=True, groups=(4, 2)),
        "layers": MIXED_LAYERS,
    },
    "experts chosen by sigmoids": {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=False, sigmoid=True),
        "layers": MIXED_LAYERS,
    },
    "groups of experts chosen by sigmoids": {
        "moe": MoeSpec(
            experts=70, top_k=3, intermediate=40, norm_top_k=True, groups=(14, 3), sigmoid=True, shared=24, scaling=2.5
        ),
        "layers": MIXED_LAYERS,
    },
    "experts chosen by a softmax and a bias": {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, biased_choice=True),
        "layers": MIXED_LAYERS,
    },
    "scaled shares of experts": {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=False, scaling=2.5),
        "layers": MIXED_LAYERS,
    },
}
WITHOUT = {
    "an MLP beside experts, behind a gate": {"shared_gate": False},
    "groups of experts": {"groups": None},
    "scaled shares of experts": {"scaling": 1.0},
    "groups of experts chosen by sigmoids": {"groups": None},
}
"""What a mixture must not be taken for."""


def pair(changes):
    """The compiled and the plain runner over the same random weights of a spec with features."""
    spec = replace(spec_of(tiny_llama(**WIDE).config), **changes)
    generator = torch.Generator().manual_seed(0)
    weights = {target.name: target.shape for target in targets(spec)}
    random = {name: torch.randn(size, generator=generator) / 4 for name, size in weights.items()}
    return [
        NativeRunner(
            spec,
            {k: v.clone() for k, v in random.items()},
            name="t",
            device=CPU,
            dtype=torch.float32,
            compiled=compiled,
        )
        for compiled in (True, False)
    ]


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_families(name):
    ours, plain = pair(FEATURES[name])
    assert isinstance(ours.passes, CompiledDecoder)
    want = whole_pass(plain, IDS[:30])
    assert want.std() > 0.05
    assert close(whole_pass(ours, IDS[:30]), want)
    assert not close(whole_pass(ours, [IDS[1], *IDS[1:30]]), want)
    if name not in {
        "odd vocabulary",
        "odd inner width",
        "one kv head",
        "three kv heads",
        "many heads per kv head",
        "tied",
    }:
        other = (
            {"head_dim": 64, "ropes": {"default": RopeSpec(theta=10000.0, dims=64)}}
            if name.startswith("rotation")
            else {}
        )
        without = whole_pass(pair(other)[0], IDS[:30])
        assert not close(without, want), "the feature makes no difference, so that equality says nothing of it"


@pytest.mark.parametrize("name", WITHOUT)
def test_features_of_mixtures_make_a_difference(name):
    moe = FEATURES[name]["moe"]
    ours, _ = pair(FEATURES[name] | {"moe": replace(moe, **WITHOUT[name])})
    _, plain = pair(FEATURES[name])
    assert not close(whole_pass(ours, IDS[:30]), whole_pass(plain, IDS[:30]), 1e-2)


@pytest.mark.parametrize("name", ["experts chosen by sigmoids", "experts chosen by a softmax and a bias"])
def test_a_bias_that_ranks_experts_counts(name):
    spec = replace(spec_of(tiny_llama(**WIDE).config), **FEATURES[name])
    weights = random_weights(spec, torch.float32)
    want = whole_pass(made(spec, weights, torch.float32, compiled=False), IDS[:30])
    assert close(whole_pass(made(spec, weights, torch.float32), IDS[:30]), want)
    unbiased = {k: torch.zeros_like(v) if k.endswith("router.bias") else v for k, v in weights.items()}
    assert not close(whole_pass(made(spec, unbiased, torch.float32), IDS[:30]), want, 1e-2)


def test_shared_and_chosen_experts_may_be_rounded_to_other_forms():
    moe = MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, shared=24, shared_gate=True)
    spec = replace(spec_of(tiny_llama(**WIDE).config), moe=moe, layers=MIXED_LAYERS)
    weights = random_weights(spec, torch.float32)
    forms = {name: "int8" if ".shared." in name else "int4" for name in weights}
    for forms_of_kind in (forms, {name: "int4" if form == "int8" else "int8" for name, form in forms.items()}):
        mixed = quantize(weights, spec, forms_of_kind)
        runner, near = made(spec, mixed, torch.float32), {k: v.float() for k, v in dequantized(mixed).items()}
        plain = made(replace(spec, tied=False), near, torch.float32, compiled=False)
        want = whole_pass(runner, IDS[:40])
        assert isinstance(runner.passes, CompiledDecoder)
        assert (want - whole_pass(plain, IDS[:40])).abs().mean() < 2e-4 * want.std()
        assert torch.equal(stepwise(runner, IDS[:40]), want)


SLIDING = (LayerSpec(window=8), LayerSpec(), LayerSpec(window=8))
LIKE = {
    "starcoder2": FEATURES["biases"]
    | {"layers": SLIDING, "norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh"},
    "cohere2": FEATURES["attention and MLP side by side"]
    | {"layers": (SLIDING[0], LayerSpec(rope=None), SLIDING[2]), "logit_multiplier": 0.25},
    "gpt_oss": FEATURES["experts with biases"]
    | {"layers": tuple(replace(layer, moe=True) for layer in SLIDING), "qkv_bias": True, "o_bias": True},
    "qwen2_moe": {
        "moe": MoeSpec(experts=6, top_k=2, intermediate=40, norm_top_k=False, shared=56, shared_gate=True),
        "layers": (LayerSpec(moe=True),) * 3,
        "qkv_bias": True,
    },
    "deepseek_v3": FEATURES["latent attention of queries"]
    | {
        "moe": MoeSpec(
            experts=8, top_k=3, intermediate=40, norm_top_k=True, shared=80, scaling=1.5, groups=(4, 2), sigmoid=True
        ),
        "layers": (LayerSpec(), LayerSpec(moe=True), LayerSpec(moe=True)),
        "intermediate_size": 184,
    },
    "apertus": FEATURES["xielu"] | {"qk_norm": "head"},
    "ernie4_5_moe": {
        "moe": MoeSpec(experts=6, top_k=2, intermediate=40, norm_top_k=True, shared=80, biased_choice=True),
        "layers": (LayerSpec(), LayerSpec(moe=True), LayerSpec(moe=True)),
    },
}


def random_weights(spec, dtype):
    generator = torch.Generator().manual_seed(1)  # no row stands between two experts, which bfloat16 may exchange
    shapes = {target.name: target.shape for target in targets(spec)}
    return {one: (torch.randn(shape, generator=generator) / 4).to(dtype) for one, shape in shapes.items()}


def made(spec, weights, dtype, **options):
    weights = {name: weight.clone() for name, weight in weights.items()}
    return NativeRunner(spec, weights, name="t", device=CPU, dtype=dtype, **options)


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIKE)
def test_all_that_families_combine(name, dtype, form):
    spec = replace(spec_of(tiny_llama(**WIDE).config), **LIKE[name])
    weights = random_weights(spec, dtype)
    weights = quantize(weights, spec, form) if form else weights
    runner = made(spec, weights, dtype)
    assert isinstance(runner.passes, CompiledDecoder)
    want = whole_pass(runner, IDS[:40])
    for width in (1, 2, 5, 16):
        assert torch.equal(stepwise(runner, IDS[:40], width), want), width
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    rows = runner.score([cache], IDS[20:21], [TREE]).logits
    path = [IDS[20], *(int(TREE.tokens[i]) for i in TREE.path(5))]
    assert torch.equal(rows[6], whole_pass(runner, [*IDS[:20], *path])[-1])
    near = {one: weight.float() for one, weight in dequantized(weights).items()}
    plain = made(replace(spec, tied=False) if form else spec, near, torch.float32, compiled=False)
    plan = native.LayerPlan(skip_attention=(1,), skip_mlp=(0,))
    parts = [one.run_layers([one.open()], [4], [TREE], plan=plan).states for one in (runner, plain)]
    least = 1e-2 if dtype is torch.bfloat16 else 1e-5 if form is None else 2e-4
    for mine, theirs in ((want, whole_pass(plain, IDS[:40])), parts):
        assert (mine.float() - theirs).abs().mean() < least * theirs.std()


FORMS, DTYPES = (None, "int8", "int4"), (torch.float32, torch.bfloat16)
STRICT = [
    {"name": name, "form": FORMS[(i + j) % 3], "dtype": dtype}
    for i, name in enumerate(LIKE)
    for j, dtype in enumerate(DTYPES)
]
"""Each family with each dtype, and each form with each dtype."""


@pytest.mark.parametrize("row", STRICT, ids=lambda row: "-".join(map(str, row.values())))
def test_strict_operators_keep_rows_for_all_that_families_combine(row):
    spec = replace(spec_of(tiny_llama(**WIDE).config), **LIKE[row["name"]], max_context=1024)
    weights = random_weights(spec, row["dtype"])
    weights = quantize(weights, spec, row["form"]) if row["form"] else weights
    strict = made(spec, weights, row["dtype"], compiled=False, strict=True)
    assert not strict.passes.row_invariant or what_varies(strict) is None


def test_layers_taps_and_the_head_alone():
    ours, plain = (runner_of(tiny_llama(**WIDE), compiled=compiled) for compiled in (True, False))
    found = []
    for runner in (ours, plain):
        cache = runner.open()
        taps = runner.extend([cache], [IDS[:70]], taps=(-1, 0, 3)).taps
        plan = native.LayerPlan(stop=2, skip_attention=(1,), skip_mlp=(0,))
        hidden = runner.run_layers([cache], [4], [TREE], plan=plan).states
        late = runner.run_layers([cache], [4], [TREE], plan=native.LayerPlan(first=2), hidden=hidden, taps=(2,))
        rest = late.states
        given = runner.run_layers([cache], [4], [EMPTY_TREE], hidden=runner.embed([4])).states
        heads = [runner.head(rest), runner.head(rest, norm=False), runner.head(rest.repeat(20, 1))]
        found.append([taps[-1], taps[0], taps[3], hidden, rest, late.taps[2], given, *heads])
    for mine, theirs in zip(*found, strict=True):
        assert close(mine / theirs.std(), theirs / theirs.std())
        assert theirs.std() > 0.1


@in_each_kind
def test_a_pass_that_stops_and_goes_on_has_the_bits_of_one(of_kind, dtype, kind):
    runner = of_kind(dtype, kind)
    cache = runner.open()
    runner.extend([cache], [IDS[:30]])
    once = runner.score([cache], [4], [TREE]).logits
    hidden = runner.run_layers([cache], [4], [TREE], plan=native.LayerPlan(stop=1)).states
    rest = runner.run_layers([cache], [4], [TREE], plan=native.LayerPlan(first=1), hidden=hidden).states
    assert torch.equal(runner.head(rest), once)
    assert not torch.equal(runner.head(hidden), once)


@pytest.mark.parametrize("copy_limit", [0, 1024])
def test_shared_and_scattered_caches(copy_limit):
    runner = compiled_runner(copy_limit=copy_limit)
    cache = runner.open()
    runner.extend([cache], [IDS[:37]])
    forks = [cache, runner.fork(cache), runner.fork(cache)]
    for step, tree in enumerate([TREE, TokenTree.chain([1, 2]), EMPTY_TREE]):
        scores = runner.score(forks, [step, step + 1, step + 2], [tree, EMPTY_TREE, tree])
        assert torch.equal(scores.of(1), whole_pass(runner, [*IDS[:37], *range(1, step + 2)])[-1:])
        runner.commit(forks, [()] * 3)
    assert (forks[1].base < 0) == (copy_limit == 0)


def test_what_compiled_passes_do_not_cover_runs_by_operators():
    spec = spec_of(tiny_llama(**WIDE).config)
    assert eligibility.unsupported(spec, torch.float32, CPU) is None
    moe = MoeSpec(experts=4, top_k=2, intermediate=32, norm_top_k=True)
    for change in [
        {"head_dim": 48},
        *(
            LATENT | {"latent": replace(LATENT["latent"], **{size: 48})}
            for size in ("rank", "nope", "value", "query_rank")
        ),
        {"hidden_size": 48},
        {"intermediate_size": 84},
        {"attention_scale": -1.0},
        {"moe": moe, "parallel": True},
        {"moe": replace(moe, shared=84)},
        {"attention_sinks": True, "attention_softcap": 1.0},
    ]:
        assert eligibility.unsupported(replace(spec, **change), torch.float32, CPU), change
    assert eligibility.unsupported(spec, torch.float16, CPU)
    assert eligibility.unsupported(spec, torch.float32, torch.device("cuda"))
    small = runner_of(tiny_llama())
    assert isinstance(small.passes, EagerPasses)


@pytest.mark.parametrize("broken", ["numba", "self-test", "threads", "cpu"])
def test_a_machine_that_lacks_something_runs_by_operators_and_says_so(broken, monkeypatch, caplog):
    eligibility.machine_lacks.cache_clear()
    if broken == "numba":
        monkeypatch.setitem(__import__("sys").modules, "paceline.models.passes.self_test", None)
    elif broken == "self-test":
        monkeypatch.setattr(self_test, "agrees", lambda dtype, quantization: False)
    elif broken == "threads":
        monkeypatch.setattr(team, "find_team", lambda: None)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    else:
        monkeypatch.setattr("paceline.models.cpu.processor.features", dict)
    with caplog.at_level(logging.DEBUG, logger="paceline"):
        runner = runner_of(tiny_llama(**WIDE))
    eligibility.machine_lacks.cache_clear()
    assert isinstance(runner.passes, EagerPasses)
    assert len([record for record in caplog.records if "compiled passes" in record.message]) == 1
    assert close(whole_pass(runner, IDS[:9]), oracle(tiny_llama(**WIDE), IDS[:9]))


def test_a_cache_directory_that_cannot_be_written_does_no_harm(monkeypatch):
    asked = []

    def cfunc(signature, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("no locator available")
        return lambda function: type("Made", (), {"cache_hits": 0})

    monkeypatch.setattr(compilation, "cfunc", cfunc)
    assert compilation.machine_code(lambda address: None, "the kernels", "a minute").cache_hits == 0
    assert asked == [True, False]


def test_no_runtime_means_no_team(monkeypatch):
    assert team.find_team() is not None
    for paths in ([], ["/nowhere/libgomp.so.1"]):
        monkeypatch.setattr(team, "mapped_runtimes", lambda paths=paths: paths)
        assert team.find_team.__wrapped__() is None


def test_weights_are_handed_over():
    weights = weights_of(tiny_llama(**WIDE))
    spec = spec_of(tiny_llama(**WIDE).config)
    runner = NativeRunner(spec, weights, name="t", device=CPU, dtype=torch.float32)
    assert not weights
    assert np.isfinite(whole_pass(runner, IDS[:5]).numpy()).all()


def test_exponential_is_right_to_two_units_in_the_last_place():
    @njit
    def exps(source, target, count):
        for i in range(0, count, 16):
            store(target + 4 * i, exponential(load(source + 4 * i)))

    x = np.concatenate([np.linspace(-87.2, 88, 4000), np.linspace(-1, 1, 96)]).astype(np.float32)
    out, edges = np.empty_like(x), np.array([-np.inf, -100, -88, 0, 1, 200, np.nan, -0.0] * 2, np.float32)
    exps(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out - exact).max() > 0
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    at_edges = np.empty_like(edges)
    exps(edges.ctypes.data, at_edges.ctypes.data, 16)
    assert at_edges[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(at_edges[6])
    assert np.isfinite(at_edges[5])


def test_pages_hand_out_aligned_memory_that_does_not_overlap():
    pages = Pages()
    parts = [pages.take(size) for size in (100, 64, 3 * 2**20, SLAB + 1, 5)]
    for i, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        part.fill_(i + 1)
    assert [(len(part), bool((part == i + 1).all())) for i, part in enumerate(parts)] == [
        (size, True) for size in (100, 64, 3 * 2**20, SLAB + 1, 5)
    ]


class Refusing(mmap.mmap):
    """Memory of a kernel that takes no advice."""

    asked = 0

    def madvise(self, *advice: int) -> None:
        type(self).asked += 1
        raise OSError(22, "Invalid argument")


def test_pages_where_the_kernel_rejects_large_ones(monkeypatch, caplog):
    monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(Refusing, "asked", 0)
    caplog.set_level(logging.DEBUG, logger="paceline")
    taken = Pages().take(1000)
    assert Refusing.asked == 1
    assert "rejects madvise (Invalid argument)" in caplog.text
    assert taken.data_ptr() % 64 == 0
    assert not taken.any()
    runner = compiled_runner()
    cache = runner.open()
    assert runner.extend([cache], [IDS[:20]]).logits.isfinite().all()


def test_pages_without_large_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    part = Pages().take(1000)
    assert part.data_ptr() % 64 == 0
    assert len(part.fill_(3)) == 1000


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("slots", [3, 5000])
def test_zeros_of_a_shape_in_pages_of_either_size(monkeypatch, slots, large):
    if not large:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    found = zeros((2, slots, 4, 64), torch.bfloat16)
    assert (found.shape, found.dtype) == ((2, slots, 4, 64), torch.bfloat16)
    assert torch.equal(found, torch.zeros_like(found))
    found[1, slots - 1] = 1.0
    assert int(found.sum()) == 256


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 8), (70, 16), (1, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_keeps_every_weight_once(outputs, inputs, dtype):
    weight = torch.arange(1, outputs * inputs + 1).view(outputs, inputs).float().cos().to(dtype)
    packed = pack(weight, Pages())
    depth = 1 if dtype is torch.float32 else 2
    assert packed.strips.shape == (-(-outputs // 64), inputs // depth, 64, depth)
    back = packed.strips.transpose(1, 2).reshape(-1, inputs)
    assert torch.equal(back[:outputs], weight)
    assert not back[outputs:].any()


def test_paired_packing_puts_gate_and_up_side_by_side():
    weight = torch.arange(2 * 40.0).view(80, 1).expand(80, 8)
    strips = pack(weight, Pages(), paired=True).strips[:, 0, :, 0]
    assert strips[0].tolist() == [*range(32), *range(40, 72)]
    assert strips[1].tolist() == [*range(32, 40), *[0] * 24, *range(72, 80), *[0] * 24]
