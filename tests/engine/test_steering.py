"""Steering in the engine: tokens of transformers, with and without drafts; distributions; caches; what is rejected."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine.harness import engine, run, tokens
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline import LLM, SamplingParams, registry
from paceline.bench import BUNDLED_TARGET
from paceline.checkpoints import write_adapter
from paceline.config import EngineConfig
from paceline.drafters import DrafterArgs
from paceline.engine import Engine, Request
from paceline.engine.scheduler import Scheduler
from paceline.errors import CapabilityError, ConfigError, PromptError
from paceline.sampling.steering import Steering, parse_steering

DRAFT = "bundled/draft"
PROMPTS = [
    "def fibonacci(n):\n",
    "The capital of France is",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
]
NEGATIVE = "import os\nx = 1\n"
STEERED: dict[str, dict[str, Any]] = {
    "dola": {"method": "dola", "layers": [1, 2, 4]},
    "cfg": {"method": "cfg", "guidance_scale": 2.0},
    "negative prompt": {"method": "cfg", "guidance_scale": 1.5, "negative_prompt": NEGATIVE},
    "contrastive": {"method": "contrastive", "model": DRAFT, "beta": 0.5},
    "svdecode": {"method": "svdecode", "model": DRAFT, "mu": 5.0},
    "lol": {"method": "lol", "model": DRAFT, "layer": 1, "refocus": 0.4, "instruction": NEGATIVE},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "dola": {"layers": [5]},
    "cfg": {"guidance_scale": 4.0},
    "negative prompt": {"guidance_scale": 4.0},
    "contrastive": {"beta": 2.0},
    "svdecode": {"mu": 0.5},
    "lol": {"beta": 2.0},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def decoded(llm: LLM, steering: Any, prompts: Sequence[Any] = PROMPTS, **changes: Any) -> list[list[int]]:
    return together(llm, [steering], prompts, **changes)[0]


def together(llm: LLM, kinds: Sequence[Any], prompts: Sequence[Any] = PROMPTS, **changes: Any) -> list[list[list[int]]]:
    """Tokens of all prompts with each kind of steering, decoded in one batch."""
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**base | {"steering": one} | changes) for one in kinds for _ in prompts]
    results = llm.generate(list(prompts) * len(kinds), params, use_tqdm=False)
    assert not [one.error for result in results for one in result.outputs if one.error]
    found = [[one.token_ids for one in result.outputs] for result in results]
    each = [found[i : i + len(prompts)] for i in range(0, len(found), len(prompts))]
    return [[tokens for outputs in one for tokens in outputs] for one in each]


# ------------------------------------------------------------------------------------------------ references


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def small() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED_TARGET.parent / "draft", dtype=torch.float32
    ).eval()


def test_guidance_gives_the_tokens_of_transformers(llm: LLM, reference: Any) -> None:
    negative = llm.tokenizer.encode(NEGATIVE)
    for given, other in (("cfg", None), ("negative prompt", torch.tensor([negative]))):
        for text, found in zip(PROMPTS, decoded(llm, STEERED[given], ignore_eos=False), strict=True):
            ids = torch.tensor([llm.tokenizer.encode(text)])
            made = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24,
                guidance_scale=STEERED[given]["guidance_scale"], negative_prompt_ids=other, pad_token_id=0,
                repetition_penalty=1.0, eos_token_id=list(llm.defaults.eos_ids),
            )  # fmt: skip
            assert found == made[0, ids.shape[1] :].tolist()
    assert decoded(llm, STEERED["cfg"] | OTHERWISE["cfg"]) != decoded(llm, STEERED["cfg"])


def first_layer(model: Any, made: Any, rows: slice) -> torch.Tensor:
    """What the state behind the first layer predicts."""
    state: torch.Tensor = (
        model.model.norm(made.hidden_states[1]) if len(made.hidden_states) > 2 else made.hidden_states[1]
    )
    found: torch.Tensor = model.lm_head(state[0, rows]).double().log_softmax(-1)
    return found


def by_hand(given: dict[str, Any], ids: list[int], count: int, reference: Any, small: Any) -> torch.Tensor:
    """(count, v) scores of the last `count` tokens of a text, each given what is before it."""
    with torch.inference_mode():
        whole = reference(torch.tensor([ids]), output_hidden_states=True)
        rows = slice(-1 - count, -1)
        p = whole.logits[0, rows].double().log_softmax(-1)
        amateur = small(torch.tensor([ids]), output_hidden_states=True)
        a = amateur.logits[0, rows].double().log_softmax(-1)
        early = [reference.lm_head(whole.hidden_states[k][0, rows]).double().log_softmax(-1) for k in (1, 2, 4)]
    kept = p >= p.amax(-1, keepdim=True) + math.log(0.1)
    if given["method"] == "contrastive":
        scores = 1.5 * p - 0.5 * a
    elif given["method"] == "lol":
        with torch.inference_mode():
            behind = reference(torch.tensor([[*given["told"], *ids]])).logits[0, rows].double().log_softmax(-1)
            low, a_low = (first_layer(model, one, rows) for model, one in ((reference, whole), (small, amateur)))
        scores = p + 0.5 * (p - a) + 0.3 * (low + 0.5 * (low - a_low)) + 0.4 * (behind - p)
    elif given["method"] == "svdecode":
        s = p - a + 1
        scores = p + 5.0 * p.exp() * (s - (p.exp() * s).sum(-1, keepdim=True))
    else:
        means = [torch.logaddexp(p, q) - math.log(2) for q in early]
        away = [(p.exp() * (p - m) + q.exp() * (q - m)).sum(-1) / 2 for q, m in zip(early, means, strict=True)]
        chosen = torch.stack(away).argmax(0)
        scores = p - torch.stack(early)[chosen, torch.arange(count)]
    return scores.masked_fill(~kept, -math.inf)


@pytest.mark.parametrize("name", ["dola", "contrastive", "svdecode", "lol"])
def test_every_token_is_the_best_by_the_formula(llm: LLM, reference: Any, small: Any, name: str) -> None:
    given = STEERED[name]
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
    decode = decoded(llm, given)
    if name == "lol":
        given = given | {"told": llm.tokenizer.encode(given["instruction"])}
    for prompt, found in zip(prompts, decode, strict=True):
        assert by_hand(given, [*prompt, *found], len(found), reference, small).argmax(-1).tolist() == found
    others = decoded(llm, STEERED[name] | OTHERWISE[name])
    assert [
        by_hand(given, [*prompt, *found], len(found), reference, small).argmax(-1).tolist() != found
        for prompt, found in zip(prompts, others, strict=True)
    ].count(True) >= 2


NEUTRAL: list[dict[str, Any]] = [
    {"method": "cfg", "guidance_scale": 1.0, "negative_prompt": NEGATIVE},
    {"method": "contrastive", "model": DRAFT, "beta": 0.0, "alpha": 0.0},
    {"method": "contrastive", "model": str(BUNDLED_TARGET), "beta": 0.5, "alpha": 0.0},
    {"method": "svdecode", "model": DRAFT, "mu": 0.0, "alpha": 0.0},
    {"method": "svdecode", "model": str(BUNDLED_TARGET), "mu": 5.0, "alpha": 0.0},
    {"method": "lol", "model": DRAFT, "beta": 0.0, "omega": 0.0, "refocus": 0.0, "alpha": 0.0},
    {"method": "lol", "model": str(BUNDLED_TARGET), "beta": 0.5, "omega": 0.0, "refocus": 0.0, "alpha": 0.0},
]


def test_neutral_settings_are_the_model(llm: LLM) -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}]
    for changes in ways:
        plain, steered, *neutral = together(llm, [None, STEERED["cfg"], *NEUTRAL], **changes)
        for given, found in zip(NEUTRAL, neutral, strict=True):
            assert found == plain, given
        assert steered != plain
    only_the_best = [{"method": "dola", "alpha": 1.0}, {"method": "contrastive", "model": DRAFT, "alpha": 1.0}]
    plain, *neutral = together(llm, [None, *only_the_best])
    assert neutral == [plain, plain]


def test_adapters_make_a_second_model_of_the_target(tmp_path: Path) -> None:
    """The base of a model that has one, and the amateur that one makes of the model."""
    folder = str(write(tmp_path / "base", max_position_embeddings=512))
    width = LLM(folder).runner.info.hidden_size
    a, b = torch.randn(4, width), torch.randn(width, 4)
    write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (a, b)}, alpha=8.0, base=folder)
    merged = write(tmp_path / "merged", max_position_embeddings=512)
    weights = load_file(merged / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] += 2.0 * b @ a
    save_file(weights, merged / "model.safetensors")
    prompts = [{"prompt_token_ids": [20 + i, 7, 8, 9]} for i in range(6)]

    tuned = LLM(folder, lora=tmp_path / "adapter", dtype="float32", speculative_config=None)
    steered: dict[str, Any] = {"method": "svdecode", "mu": 100.0}
    found = decoded(tuned, steered, prompts)
    assert found == decoded(tuned, steered | {"model": folder}, prompts)
    assert found != decoded(tuned, None, prompts)

    plain = LLM(folder, dtype="float32", speculative_config=None)
    steered = {"method": "lol", "beta": 2.0, "instruction": [3, 4]}
    found = decoded(plain, steered | {"model": str(tmp_path / "adapter")}, prompts)
    assert found == decoded(plain, steered | {"model": str(merged)}, prompts)
    assert found != decoded(plain, steered | {"model": folder}, prompts)


class Mixture(Steering):
    """Half of the model, half of what it says behind another prompt."""

    name = "mixture"
    companions = ("prompt",)

    def __init__(self, prompt: str | None = None) -> None:
        self.prompt = prompt

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        (other_rv,) = others
        return (rows_rv.softmax(-1) + other_rv.softmax(-1)).log()


def test_a_method_of_ones_own(llm: LLM) -> None:
    given = {"method": f"{__name__}:Mixture"}
    assert decoded(llm, given | {"prompt": PROMPTS[0]}, PROMPTS[:1]) == decoded(llm, None, PROMPTS[:1])
    assert decoded(llm, given | {"prompt": NEGATIVE}, PROMPTS[:1]) != decoded(llm, None, PROMPTS[:1])


# ------------------------------------------------------------------------------------------------ drafts


DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "tree": {"method": "draft_model", "num_speculative_tokens": 8, "tree_width": 2},
    "layers": {"method": "layer_skip", "num_speculative_tokens": 4, "exit_layer": 3},
}


@pytest.mark.parametrize("name", ["dola", "contrastive", "svdecode", "lol"])
def test_a_grammar_may_ask_for_what_the_model_finds_implausible(llm: LLM, name: str) -> None:
    given = {**STEERED[name], "alpha": 0.9}
    params = SamplingParams(temperature=0.0, max_tokens=8, steering=given, structured_outputs={"regex": "[xy]{5}"})
    (found,) = llm.generate("The capital of France is", params)
    assert found.outputs[0].error is None
    assert set(found.outputs[0].text) <= set("xy")
    assert len(found.outputs[0].text) == 5


@pytest.fixture(scope="module")
def drafting(llm: LLM) -> dict[str, LLM]:
    return {name: llm.with_speculative_config(config) for name, config in DRAFTS.items()}


def test_drafts_change_nothing(llm: LLM, drafting: dict[str, LLM]) -> None:
    greedy, drawn = {"max_tokens": 12}, {"temperature": 0.8, "seed": 11, "presence_penalty": 0.4, "top_p": 0.95}
    for changes, crews in ((greedy, tuple(DRAFTS)), (greedy | drawn, ("ngram", "tree"))):
        plain = together(llm, list(STEERED.values()), **changes)
        for drafts in crews:
            for name, found, wanted in zip(
                STEERED, together(drafting[drafts], list(STEERED.values()), **changes), plain, strict=True
            ):
                assert found == wanted, (name, drafts)
        others = together(drafting["tree"], [STEERED[name] | OTHERWISE[name] for name in STEERED], **changes)
        for name, found, wanted in zip(STEERED, others, plain, strict=True):
            assert found != wanted, name


def test_drafts_are_accepted(drafting: dict[str, LLM]) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, steering=given)
        for given in STEERED.values()
        for _ in PROMPTS
    ]
    results = drafting["tree"].generate(PROMPTS * len(STEERED), params, use_tqdm=False)
    accepted = [one.metrics.num_accepted_tokens for one in results]
    for i, name in enumerate(STEERED):
        assert sum(accepted[i * len(PROMPTS) : (i + 1) * len(PROMPTS)]) > 10, name


def test_requests_of_all_kinds_share_a_batch(llm: LLM, drafting: dict[str, LLM]) -> None:
    kinds = [None, *STEERED.values()]
    alone = [decoded(llm, given, PROMPTS[:1])[0] for given in kinds]
    assert len({tuple(found) for found in alone}) > 3
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, steering=given) for given in kinds]
    for other in (llm, drafting["tree"]):
        results = other.generate(PROMPTS[:1] * len(kinds), params, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in results] == alone


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    given, params = STEERED["cfg"], SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, steering=STEERED["cfg"])
    (result,) = llm.generate(PROMPTS[0], params)
    output = result.outputs[0]
    prompt = llm.tokenizer.encode(PROMPTS[0])
    for i, token in enumerate(output.token_ids):
        before = {"prompt_token_ids": [*prompt, *output.token_ids[:i]]}
        (raw,) = llm.generate(before, SamplingParams(temperature=0.0, max_tokens=1, logprobs=128))
        assert output.logprobs is not None
        assert raw.outputs[0].logprobs[0][token].logprob == pytest.approx(output.logprobs[i][token].logprob, abs=1e-4)
    assert given["guidance_scale"] != 1.0


# ------------------------------------------------------------------------------------------------ distributions


VOCAB, LENGTH, TEMPERATURE = 6, 2, 0.9
PROMPT = [1, 2, 1, 2, 3, 1, 2]


class HeadToy(ToyRunner):
    """A toy whose layers predict."""

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        seed = 5 + self.seed
        matrix = torch.randn(self.info.hidden_size, self.info.vocab_size, generator=torch.Generator().manual_seed(seed))
        return hidden @ matrix


class OneModel:
    """Opens one model, whatever it is called."""

    def __init__(self, runner: ToyRunner) -> None:
        self.runner = runner

    def open(self, model: str, **options: Any) -> ToyRunner:
        return self.runner


def toy(**options: Any) -> HeadToy:
    return HeadToy(VOCAB, order=2, sharpness=1.0, **options)


def amateur(**options: Any) -> HeadToy:
    return HeadToy(VOCAB, order=2, sharpness=1.0, seed=8, **options)


def live_with(
    target: ToyRunner, second: ToyRunner, drafters: Sequence[Any] = (), nodes: int = 0, **sizes: Any
) -> Engine:
    made = engine(target, drafters, nodes, **sizes)
    return Engine(made.parts, EngineConfig(**sizes), eos_ids=(0,), models=OneModel(second))  # type: ignore[arg-type]


def tree_drafter(target: ToyRunner, vocab: int = VOCAB) -> Any:
    near = ToyRunner(VOCAB, order=2, sharpness=1.0, noise=0.8)
    args = DrafterArgs(vocab_size=vocab, index=0, max_context=4096, target=target, load_runner=lambda name: near)
    return registry.load("drafters", "draft_model")(args, model="toy", tree_width=3)


TOYS: list[dict[str, Any]] = [
    {"method": "dola", "layers": [0, 1, 3], "alpha": 0.05},
    {"method": "cfg", "guidance_scale": 1.8, "negative_prompt": [4, 5]},
    {"method": "contrastive", "model": "toy", "beta": 0.8, "alpha": 0.05},
    {"method": "svdecode", "model": "toy", "mu": 2.0, "alpha": 0.05},
    {"method": "lol", "model": "toy", "alpha": 0.05, "refocus": 0.6, "instruction": [4, 5]},
]


def steered_distribution(given: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens."""
    target, second, method = toy(), amateur(), parse_steering(given)
    found = {}
    for output in product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(output):
            text, behind = [*PROMPT, *output[:i]], [4, 5, *output[:i]]
            layers, lower = (
                [one.head(one.hidden(tap, text)[None]) for tap in method.taps(4)] for one in (target, second)
            )
            told = target.logits([4, 5, *text])[None]
            others = {
                "dola": layers,
                "cfg": [target.logits(behind)[None]],
                "lol": [*layers, second.logits(text)[None], *lower, told],
            }.get(given["method"], [second.logits(text)[None]])
            row = method.shape(target.logits(text)[None], others)[0]
            chance *= float((row.double() / TEMPERATURE).softmax(-1)[token])
        found[output] = chance
    return found


@pytest.mark.parametrize("given", TOYS, ids=lambda given: str(given["method"]))
def test_outputs_follow_the_steered_distribution(given: dict[str, Any]) -> None:
    target, second = toy(), amateur()
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, n=64, ignore_eos=True, steering=given)
    live = live_with(target, second, [tree_drafter(target)], 6)
    requests = run(live, [PROMPT] * 6, params, seed=1000)
    assert sum(request.metrics.num_accepted_tokens for request in requests) > 50
    assert not any(request.metrics.dropped_drafters for request in requests)
    assert target.open_caches == second.open_caches == 0
    counts = Counter(tuple(o.token_ids) for request in requests for o in request.outputs)
    expected, otherwise = steered_distribution(given), steered_distribution({**given, **_other(given)})
    assert g_test([counts[k] for k in expected], list(expected.values())) > ERROR
    assert g_test([counts[k] for k in otherwise], list(otherwise.values())) < ERROR


def _other(given: dict[str, Any]) -> dict[str, Any]:
    return {"dola": {"layers": [2]}, "cfg": {"guidance_scale": 1.0}, "svdecode": {"mu": 0.0}}.get(
        given["method"], {"beta": 0.0}
    )


# ------------------------------------------------------------------------------------------------ caches


def test_tokens_that_the_amateur_lacks_are_never_chosen() -> None:
    params = SamplingParams(
        temperature=1.0,
        max_tokens=12,
        n=8,
        ignore_eos=True,
        steering={"method": "contrastive", "model": "toy", "alpha": 0},
    )
    for pad, most in ((-2, VOCAB - 3), (3, VOCAB - 1)):
        target, second = toy(), amateur(pad=pad)
        live = live_with(target, second, [tree_drafter(target)], 6)
        (request,) = run(live, [[1, 2, 1, 3]], params)
        assert max(max(one.token_ids) for one in request.outputs) == most
    with pytest.raises(PromptError, match=r"token ids in 0\.\.3"):
        run(live_with(toy(), amateur(pad=-2)), [[1, 5]], params)


@pytest.mark.parametrize("given", TOYS, ids=lambda given: str(given["method"]))
def test_caches_follow_every_life_of_a_sequence(given: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=30, n=3, ignore_eos=True, seed=2, steering=given)

    def fresh() -> tuple[ToyRunner, ToyRunner, Engine]:
        target, second = toy(), amateur()
        return target, second, live_with(target, second, [tree_drafter(target)], 6, max_num_batched_tokens=4)

    target, second, live = fresh()
    whole = tokens(run(live, [PROMPT, PROMPT[2:]], params))
    assert target.open_caches == second.open_caches == 0

    target, second, live = fresh()
    pauses = iter([5, 9, 14])
    due = next(pauses)

    def pausing() -> None:
        nonlocal due
        if live.parts.runner.calls and len(live.scheduler.running) > 1 and steps[0] == due:
            live.scheduler.pause(live.scheduler.running[1])
            due = next(pauses, -1)
        steps[0] += 1

    steps = [0]
    step = live.step
    live.step = lambda: (pausing(), step())[1]  # type: ignore[method-assign]
    assert tokens(run(live, [PROMPT, PROMPT[2:]], params)) == whole
    assert due == -1
    assert target.open_caches == second.open_caches == 0

    target, second, live = fresh()
    added = 2 if given["method"] in ("cfg", "lol") else 1
    requests = run_some(live, params)
    assert target.open_caches == 3 * added
    assert second.open_caches == (3 if "model" in given else 0)
    live.abort(requests[0])
    assert target.open_caches == second.open_caches == 0

    target, second, live = fresh()
    run_some(live, params)
    live.fail_started(RuntimeError("cut short"))
    assert target.open_caches == second.open_caches == 0
    assert not live.has_work


def run_some(live: Engine, params: SamplingParams) -> list[str]:
    """Ids of a request that is being decoded."""
    request = Request("one", None, list(PROMPT), params, 7, 30)
    live.add(request)
    for _ in range(5):
        live.step()
    assert len(live.scheduler.running) == 3
    return [request.id]


def test_second_sequences_keep_what_was_accepted() -> None:
    """One pass fills the cache, and each step feeds a root and the nodes of its tree, none of them twice."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, steering=TOYS[2])
    target, second = toy(), amateur()
    (request,) = run(live_with(target, second, [tree_drafter(target)], 6), [PROMPT], params)
    steps = request.metrics.num_steps
    assert steps < 30
    assert (second.calls, second.fed) == (1 + steps, target.fed)
    target = toy()
    params.steering = TOYS[1]
    run(live_with(target, second), [PROMPT], params)
    assert target.calls == 2 + 30


def test_a_companion_that_fails_ends_its_request_alone() -> None:
    given = {"method": "contrastive", "model": "toy", "beta": 0.5}
    target, second = toy(), amateur(nan_from=len(PROMPT) + 5)
    live = live_with(target, second)
    each = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, steering=one) for one in (given, None)]
    steered, plain = run(live, [PROMPT, PROMPT], each)
    assert steered.outputs[0].finish_reason == "error"
    assert len(steered.outputs[0].token_ids) == 5
    assert plain.outputs[0].finish_reason == "length"
    assert target.open_caches == second.open_caches == 0


class Breaking(Steering):
    """Raises, or gives something else than rows, where the model is as sure as `at`; elsewhere nothing is changed."""

    name = "breaking"
    asked: ClassVar[list[float]] = []

    def __init__(self, at: Sequence[float], how: str = "raise", companions: Sequence[Any] = (), tap: int = 0) -> None:
        self.at, self.how, self.companions, self.tap = at, how, companions, tap

    def taps(self, num_layers: int) -> tuple[int, ...]:
        return (self.tap,)

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        sure = [round(float(row_v.max()), 4) for row_v in rows_rv]
        self.asked.extend(sure)
        assert [len(one) for one in others] == [len(sure)]
        if set(sure).isdisjoint(self.at):
            return rows_rv
        rows_rv.zero_()  # it must not, and whoever does it harms nobody else
        if self.how == "raise":
            raise LookupError("a mistake of a user's")
        return rows_rv[:, :3]


def broken(how: str, at: Sequence[float], drafted: bool) -> list[Any]:
    """A request between two others, one of which is steered by the same class where nothing is wrong."""
    target = toy()
    live = live_with(target, amateur(), [tree_drafter(target)] if drafted else [], 6 if drafted else 0)
    method = {"method": f"{__name__}:Breaking", "how": how}
    each = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, steering=one)
        for one in (None, {**method, "at": at}, {**method, "at": []})
    ]
    requests = run(live, [PROMPT] * 3, each)
    assert target.open_caches == 0
    return [request.outputs[0] for request in requests]


def sureness(output: Sequence[int]) -> list[float]:
    """Largest logit before each token of an output."""
    return [round(float(toy().logits([*PROMPT, *output[:i]]).max()), 4) for i in range(len(output))]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("how", ["raise", "shape"])
def test_a_method_that_fails_ends_its_request_where_plain_decoding_would_and_no_other(how: str, drafted: bool) -> None:
    whole, same, other = broken(how, [], drafted)
    assert whole.token_ids == same.token_ids == other.token_ids
    certain = sureness(whole.token_ids)
    place = max(certain.index(one) for one in certain)
    assert place > 2
    plain, failing, beside = broken(how, [certain[place]], drafted)
    assert plain.token_ids == beside.token_ids == whole.token_ids
    assert plain.error is beside.error is None
    assert (failing.token_ids, failing.finish_reason) == (whole.token_ids[:place], "error")
    why = {"raise": "LookupError: a mistake", "shape": "TypeError: shape must return logits of shape (1, 6), got"}
    assert f"steering method 'breaking' failed ({why[how]}" in failing.error


def test_a_method_that_fails_on_rejected_drafts_alone_is_not_noticed() -> None:
    Breaking.asked.clear()
    whole, *_ = broken("raise", [], drafted=True)
    elsewhere = sorted(set(Breaking.asked) - set(sureness(whole.token_ids)))
    assert elsewhere, "no draft was rejected"
    _, failing, _ = broken("raise", elsewhere, drafted=True)
    assert (failing.token_ids, failing.error) == (whole.token_ids, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tap": 9}, "taps of steering method 'breaking' must be layers in -1..3"),
        ({"companions": ["models"]}, "companions of steering method 'breaking' must be one of prompt, model"),
        ({"method": f"{__name__}:Nameless"}, "Nameless'> has no name"),
    ],
)
def test_a_class_that_asks_for_what_there_is_not_is_rejected(given: dict[str, Any], message: str) -> None:
    named = {"method": f"{__name__}:Breaking", "at": [], **given}
    with pytest.raises(ConfigError, match=message):
        run(live_with(toy(), amateur()), [PROMPT], SamplingParams(steering=named))


class Nameless(Steering):
    """Lacks a name."""

    def __init__(self, at: Any = ()) -> None:
        del at

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        return rows_rv


def test_second_sequences_count_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write(tmp_path, max_position_embeddings=512))
    prompts = [{"prompt_token_ids": [20 + i, 7, 8, 9, 30 + i] * (2 + i)} for i in range(4)]
    given = {"method": "cfg", "guidance_scale": 1.5, "negative_prompt": [5, 6, 7] * 12}
    options: dict[str, Any] = {"exactness": "strict", "threads": 1, "speculative_config": DRAFTS["ngram"]}
    ample = LLM(folder, **options)
    plenty = decoded(ample, given, prompts, max_tokens=60)
    assert plenty != decoded(ample, None, prompts, max_tokens=60)
    blocks = 16
    short = LLM(folder, kv_cache_memory_bytes=blocks * ample.runner.memory.block_bytes, **options)
    paused: list[int] = []
    pause, release = Scheduler.pause, Scheduler.remove

    def noting(self: Scheduler, sequence: Any) -> None:
        paused.append(sequence.key)
        pause(self, sequence)

    held: list[int] = []

    def counting(self: Scheduler, sequence: Any, **more: Any) -> None:
        held.append(self.memory.used if self.memory is not None else 0)
        release(self, sequence, **more)

    monkeypatch.setattr(Scheduler, "pause", noting)
    monkeypatch.setattr(Scheduler, "remove", counting)
    assert decoded(short, given, prompts, max_tokens=60) == plenty
    assert paused
    assert max(held) <= blocks
    assert short.runner.memory.left() == short.runner.memory.capacity
    with pytest.raises(PromptError, match="lower max_tokens"):
        decoded(short, given, prompts, max_tokens=400)


# ------------------------------------------------------------------------------------------------ rejected


def test_what_cannot_be_steered_is_rejected(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="steering must be left out with search"):
        llm.generate("x", SamplingParams(steering="dola"), search="beam")
    with pytest.raises(ConfigError, match="unknown steering method 'doal'"):
        decoded(llm, "doal")
    with pytest.raises(ConfigError, match="layers must be below 6"):
        decoded(llm, {"method": "dola", "layers": [6]})
    with pytest.raises(PromptError, match=r"the context of .* holds 2048; lower max_tokens"):
        decoded(llm, {"method": "cfg", "negative_prompt": [5] * 2040}, max_tokens=20)
    with pytest.raises(PromptError, match=r"token ids in 0\.\.6143"):
        decoded(llm, {"method": "cfg", "negative_prompt": [6144]})
    with pytest.raises(ConfigError, match="model must name the base"):
        decoded(llm, "svdecode")
    target, blind = toy(), toy()
    blind.capabilities = type(blind.capabilities)(trees=True)
    chains_only, unseeing = (
        live_with(target, amateur(trees=False), [tree_drafter(target)], 6),
        live_with(blind, amateur()),
    )
    contrast = SamplingParams(steering={"method": "contrastive", "model": "toy"})
    with pytest.raises(CapabilityError, match="'contrastive' needs a model that scores several continuations"):
        run(chains_only, [PROMPT], contrast)
    with pytest.raises(CapabilityError, match="'dola' needs a model that gives the states"):
        run(unseeing, [PROMPT], SamplingParams(steering="dola"))
    with pytest.raises(ConfigError, match=r"steering=.* cannot be used with a diffusion language model"):
        LLM("bundled/diffusion").generate("x", SamplingParams(steering="dola"))
