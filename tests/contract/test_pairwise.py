"""The exactness table on the bundled model in float32: rows that hold every pair of drafter, parameter, mode and
batch. Rows of several prompts are decoded in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest
import tiny_denoiser
from processors import by_all_tokens, unlike_the_last
from tools.pairwise import pairs_of, pairwise

from benchmarks.stand_ins import (
    adapter_weights,
    random_head,
    write_masked_draft,
    write_shuffled_draft,
    written_adapter,
    written_rate_adapters,
)
from paceline import LLM, SamplingParams, claims, registry
from paceline.bench import bundled_prompts
from paceline.config import RequestOutputKind
from paceline.drafters.retrieval import DatastoreWriter
from paceline.llm import BUNDLED

Config = dict[str, Any]
PARAMETERS: dict[str, Config] = {
    "temperature, seed, n, logprobs, prompt_logprobs": {"n": 2, "logprobs": 2, "prompt_logprobs": 1},
    "top_p, stop": {"top_p": 0.9, "stop": ["\n", "of"]},
    "top_k, stop_token_ids": {"top_k": 20, "stop_token_ids": [202, 15]},
    "min_p, min_tokens": {"min_p": 0.05, "min_tokens": 8},
    "presence_penalty, frequency_penalty, truncate_prompt_tokens, skip_special_tokens": {
        "presence_penalty": 0.6, "frequency_penalty": 0.3, "truncate_prompt_tokens": 5, "skip_special_tokens": False,
    },
    "repetition_penalty, include_stop_str_in_output": {
        "repetition_penalty": 1.2, "stop": ["a", "e"], "include_stop_str_in_output": True,
    },
    "logit_bias, max_tokens": {"logit_bias": {5: 4.0, 12: -100.0}, "max_tokens": 7},
    "allowed_token_ids": {"allowed_token_ids": range(3, 900, 2)},
    "bad_words, ignore_eos, detokenize, output_kind": {
        "bad_words": ["return", "the"], "ignore_eos": True, "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    },
    "logits_processors": {"logits_processors": [unlike_the_last, by_all_tokens]},
    "structured_outputs": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
    "steering": {"steering": {"method": "dola", "layers": [1, 2, 4]}},
}  # fmt: skip
"""What does not get in each other's way comes together."""
NEEDS: dict[str, Callable[[LLM, Path], Config]] = {
    "draft_model": lambda llm, folder: {"model": str(BUNDLED / "draft")},
    "pearl": lambda llm, folder: {"model": str(BUNDLED / "draft"), "overlap": True},
    "specmquant": lambda llm, folder: {"model": str(BUNDLED / "draft"), "min_draft_length": 5},
    "s2d": lambda llm, folder: {"model": str(BUNDLED / "target"), "draft_exits": [2, 4], "draft_exit_thresholds": 0.5},
    "easyspec": lambda llm, folder: {"model": str(BUNDLED / "target")},
    "pard": lambda llm, folder: {"model": masked(folder)},
    "kangaroo": lambda llm, folder: {"model": adapter(llm.runner.info.hidden_size), "draft_stop_threshold": 0.0},
    "m2r2": lambda llm, folder: {"model": rate_adapters(llm.runner.info.hidden_size, llm.runner.info.num_layers)},
    "medusa": lambda llm, folder: {"model": head(llm, "medusa")},
    "hydra": lambda llm, folder: {"model": head(llm, "hydra"), "tree_width": 2},
    "hydra++": lambda llm, folder: {"model": head(llm, "hydra++")},
    "clover": lambda llm, folder: {"model": head(llm, "clover"), "tree_width": 2},
    "chimera": lambda llm, folder: {"model": head(llm, "chimera"), "tree_width": 2},
    "ppd": lambda llm, folder: {"model": head(llm, "ppd"), "tree_width": 2},
    "lud": lambda llm, folder: {"model": head(llm, "lud")},
    "hidden_transfer": lambda llm, folder: {"model": head(llm, "hidden_transfer"), "tree_policy": "eagle2"},
    "mlp_speculator": lambda llm, folder: {"model": head(llm, "mlp_speculator"), "tree_policy": "eagle2"},
    "eagle": lambda llm, folder: {"model": head(llm, "eagle")},
    "eagle2": lambda llm, folder: {"model": head(llm, "eagle")},
    "fspad": lambda llm, folder: {"model": head(llm, "fspad")},
    "eagle3": lambda llm, folder: {"model": head(llm, "eagle3"), "tree_policy": "eagle2"},
    "dovetail": lambda llm, folder: {"model": head(llm, "dovetail")},
    "p_eagle": lambda llm, folder: {"model": head(llm, "p_eagle"), "tree_width": 2},
    "falcon": lambda llm, folder: {"model": head(llm, "falcon"), "tree_width": 2},
    "longspec": lambda llm, folder: {"model": head(llm, "longspec"), "tree_width": 2},
    "mtp": lambda llm, folder: {"model": head(llm, "mtp")},
    "dflash": lambda llm, folder: {"model": head(llm, "dflash")},
    "dspark": lambda llm, folder: {"model": head(llm, "dspark"), "confidence_threshold": 0.4, "tree_width": 2},
    "layer_skip": lambda llm, folder: {"resume_verification": True},
    "del": lambda llm, folder: {"resume_verification": True},
    "diffuspec": lambda llm, folder: {"model": denoiser(folder)},
    "deer": lambda llm, folder: {"model": denoiser(folder)},
    "tli": lambda llm, folder: {"model": shuffled(folder)},
    "slem": lambda llm, folder: {"model": shuffled(folder)},
    "rest": lambda llm, folder: {"datastore": store(llm, folder)},
    "rasd": lambda llm, folder: {"datastore": store(llm, folder)},
}
OF_ENCODERS = ("encdec_draft",)
"""What the bundled model, which has no encoder, cannot use."""
PREDICTED = "The first thing is the name of the thing."
MODES = ("greedy", "seeded")
FACTORS = {
    "drafter": [*(name for name in registry.DRAFTERS if name not in OF_ENCODERS), "auto", "merged"],
    "parameter": list(PARAMETERS),
    "mode": MODES,
    "batch": ("one", "four"),
    "nodes": (3, 8),
}
ROWS = list(pairwise(FACTORS))


def prompts(llm: LLM) -> list[list[int]]:
    """Four prompts of different lengths and tasks."""
    return [llm.chat_ids([{"role": "user", "content": p.prompt}]) for p in bundled_prompts()[::7][:4]]


def store(llm: LLM, folder: Path) -> str:
    """What the target says to these prompts, as a datastore."""
    path = folder / "texts.datastore"
    if not path.exists():
        with DatastoreWriter(path, llm.tokenizer) as writer:
            for one in recorded(llm):
                writer.add(one["prompt"] + one["continuation"])
                writer.end_document()
            writer.finish(1)
    return str(path)


@cache
def adapter(width: int) -> str:
    """Of random weights: what it drafts is wrong, and must not show."""
    return written_adapter(adapter_weights(width), width, heads=4)


@cache
def rate_adapters(width: int, layers: int) -> str:
    """The same, for M2R2."""
    return written_rate_adapters(width, layers, 2)


def head(llm: LLM, method: str) -> str:
    info, spec = llm.runner.info, llm.runner.spec  # type: ignore[attr-defined]
    return random_heads(method, info.hidden_size, info.vocab_size, kv_heads=spec.num_kv_heads)


random_heads = cache(random_head)


def denoiser(folder: Path) -> str:
    """Of random weights."""
    found = folder / "denoiser"
    return str(found if found.exists() else tiny_denoiser.write(found))


def masked(folder: Path) -> str:
    """The bundled draft with a mask token."""
    found = folder / "masked"
    return str(found if found.exists() else write_masked_draft(found))


def shuffled(folder: Path) -> str:
    """The bundled draft under another tokenizer."""
    found = folder / "shuffled"
    return str(found if found.exists() else write_shuffled_draft(found))


def recorded(llm: LLM) -> list[Config]:
    found = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts(llm)], SamplingParams(temperature=0.0, max_tokens=24)
    )
    return [{"prompt": out.prompt_token_ids, "continuation": out.outputs[0].token_ids} for out in found]


def config_of(drafter: str, nodes: int, llm: LLM, folder: Path) -> Config:
    if drafter == "auto":
        return {"method": "auto"}
    if drafter == "merged":
        return {
            "method": ["ngram", {"method": "draft_model", "model": str(BUNDLED / "draft")}],
            "num_speculative_tokens": nodes,
        }
    needs = NEEDS.get(drafter, lambda llm, folder: {})(llm, folder)
    return {"method": drafter, "num_speculative_tokens": nodes, **needs}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Callable[[dict[str, Any]], list[Any]]:
    """What plain decoding says to a row, whatever drafts there."""
    known: dict[tuple[str, str, str], list[Any]] = {}

    def of(row: dict[str, Any]) -> list[Any]:
        key = row["parameter"], row["mode"], row["batch"]
        if key not in known:
            known[key] = decoded(plain, row)
        return known[key]

    return of


@pytest.fixture(scope="module")
def engines(plain: LLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], LLM]:
    known: dict[tuple[str, int], LLM] = {}
    folder = tmp_path_factory.mktemp("pairwise")

    def of(drafter: str, nodes: int) -> LLM:
        if (drafter, nodes) not in known:
            known[drafter, nodes] = plain.with_speculative_config(config_of(drafter, nodes, plain, folder))
        return known[drafter, nodes]

    return of


def decoded(llm: LLM, row: dict[str, Any]) -> list[Any]:
    return all_decoded(llm, [row])[0]


def all_decoded(llm: LLM, rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What each row gives, in one batch."""
    given: list[tuple[Config, SamplingParams]] = []
    for row in rows:
        mode: Config = {"temperature": 0.0} if row["mode"] == "greedy" else {"temperature": 0.8, "seed": 11}
        params = SamplingParams(**{"max_tokens": 10, **mode, **PARAMETERS[row["parameter"]]})
        given += [({"prompt_token_ids": ids, "prediction": PREDICTED}, params) for ids in prompts(llm)[: size(row)]]
    found = llm.generate([prompt for prompt, _ in given], [params for _, params in given])
    assert not any(out.metrics.dropped_drafters for out in found)
    seen = iter(
        [
            [(o.token_ids, o.text, o.finish_reason, o.stop_reason, ranks(o.logprobs)) for o in out.outputs]
            for out in found
        ]
    )
    return [list(islice(seen, size(row))) for row in rows]


def size(row: dict[str, Any]) -> int:
    return 1 if row["batch"] == "one" else 4


def ranks(logprobs: Any) -> Any:
    """Logprobs to five digits: rows beside a row may change the last ones in float32."""
    return logprobs and [
        {token: (round(one.logprob, 4), one.rank) for token, one in entry.items()} for entry in logprobs
    ]


@pytest.mark.parametrize("drafter", FACTORS["drafter"])
def test_equal_to_plain_decoding(
    expected: Callable[[dict[str, Any]], list[Any]], engines: Callable[[str, int], LLM], drafter: str
) -> None:
    mine = [row for row in ROWS if row["drafter"] == drafter]
    together = [[row for row in mine if (row["batch"], row["nodes"]) == ("four", nodes)] for nodes in FACTORS["nodes"]]
    for rows in [*([row] for row in mine if row["batch"] == "one"), *filter(None, together)]:
        for row, found in zip(rows, all_decoded(engines(drafter, rows[0]["nodes"]), rows), strict=True):
            assert found == expected(row), row


def test_every_pair_is_there() -> None:
    assert sorted(name for names in PARAMETERS for name in names.split(", ")) == sorted(claims.PARAMETERS)
    wanted = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x, y in product(FACTORS[a], FACTORS[b])}
    covered = set().union(*(pairs_of(row) for row in ROWS))
    assert covered == wanted
    assert len(ROWS) < 1.6 * len(FACTORS["drafter"]) * len(FACTORS["parameter"])


def test_the_comparison_catches_another_seed(plain: LLM) -> None:
    row = {"drafter": "ngram", "parameter": next(iter(PARAMETERS)), "mode": "seeded", "batch": "four", "nodes": 3}
    other = {**row, "mode": "greedy"}
    assert decoded(plain, row) != decoded(plain, other)
