"""What strict mode is checked with: every drafter of the registry, alone, together and under `auto`.

Beside the bundled target, drafters that want a model which Paceline does not bundle are given one whose guesses mostly
fail: an adapter and heads of random weights, and the bundled draft under shuffled token ids. What they guess is not the
point; that it does not show is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from decoding import Model
from stand_ins import (
    adapter_weights,
    random_head,
    write_masked_draft,
    write_shuffled_draft,
    written_adapter,
    written_rate_adapters,
)

from paceline import RequestOutput, registry
from paceline.bench.run import DIAL
from paceline.checkpoints import Tokenizer
from paceline.drafters.retrieval import DatastoreWriter
from paceline.llm import BUNDLED

Config = dict[str, Any]

GUESSES = {"num_speculative_tokens": 6}
NGRAM: Config = {"method": "ngram", **GUESSES}
DRAFT: Config = {"method": "draft_model", "model": str(BUNDLED / "draft"), **GUESSES}
NEAR = {"draft_context": 64, "draft_masks": 8}
TARGET, DENOISER = str(BUNDLED / "target"), str(BUNDLED / "diffusion")
WIDTH, LAYERS, VOCAB, KV_HEADS = 256, 6, 6144, 2
HEADS = (
    *("medusa", "hydra", "hydra++", "clover", "chimera", "ppd", "mlp_speculator", "eagle", "fspad"),
    *("eagle3", "p_eagle", "falcon", "longspec", "mtp", "dflash", "dspark", "hidden_transfer", "lud"),
)

NEED_A_PAIR = (
    *("draft_model", "pearl", "specmquant", "s2d", "easyspec", "pard", "kangaroo", "m2r2", "eagle2", "diffuspec"),
    *("deer", "tli", "slem", *HEADS),
)
"""Drafters with a model of their own, which only the bundled target has."""

METHODS = (*(name for name in registry.DRAFTERS if name != "encdec_draft"), DIAL)
"""All but one for models with an encoder."""
NAMES = (*METHODS, "list", "auto")


def settings(plain: Sequence[RequestOutput], model: Model) -> dict[str, Config]:
    """Name -> speculative_config; those that look something up are given what plain decoding says."""
    record = {tuple(one.prompt_token_ids): list(one.outputs[0].token_ids) for one in plain}
    texts, draft = store(plain, model), {**model.draft, **GUESSES}
    needs: dict[str, Config] = {
        "lookahead": {"num_speculative_tokens": 18},
        "rest": {"datastore": texts},
        "corrupted_oracle": {"continuations": record, "acceptance": 0.8},
    }
    names = METHODS
    if model.name == "bundled":
        needs |= pair()
    else:
        names = tuple(name for name in METHODS if name not in NEED_A_PAIR)
    return {
        **{name: {"method": name, **GUESSES} | needs.get(name, {}) for name in names},
        "rasd": {"method": [draft, {"method": "rasd", "datastore": texts}], "num_speculative_tokens": 12},
        "list": {"method": [NGRAM, draft], "num_speculative_tokens": 12},
        "auto": {"method": "auto"},
    }


def pair() -> dict[str, Config]:
    """Options of the drafters that need a model beside the bundled target."""
    return {
        "draft_model": DRAFT,
        "pearl": {"model": DRAFT["model"], "overlap": True},
        "specmquant": {"model": DRAFT["model"], "min_draft_length": 4},
        "s2d": {"model": TARGET, "draft_exits": [2, 4], "draft_exit_thresholds": 0.5},
        "easyspec": {"model": TARGET},
        "pard": {"model": masked()},
        "kangaroo": {"model": adapter(), "draft_stop_threshold": 0.0, "num_speculative_tokens": 2},
        "m2r2": {"model": written_rate_adapters(WIDTH, LAYERS, 2), "num_speculative_tokens": 2},
        **{name: {"model": random_head(name, WIDTH, VOCAB, kv_heads=KV_HEADS)} for name in HEADS},
        "eagle2": {"model": random_head("eagle", WIDTH, VOCAB)},
        "diffuspec": {"model": DENOISER, **NEAR},
        "deer": {"model": DENOISER, **NEAR},
        "tli": {"model": shuffled()},
        "slem": {"model": shuffled()},
    }


def store(plain: Sequence[RequestOutput], model: Model) -> str:
    """A datastore of these outputs."""
    folder = Path(mkdtemp(prefix="paceline-strict-"))
    with DatastoreWriter(folder / "outputs.datastore", Tokenizer.load(model.tokenizer)) as writer:
        for one in plain:
            writer.add([*one.prompt_token_ids, *one.outputs[0].token_ids])
            writer.end_document()
        writer.finish(1)
    return str(folder / "outputs.datastore")


@cache
def masked() -> str:
    """The bundled draft with a mask token."""
    return str(write_masked_draft(Path(mkdtemp(prefix="paceline-strict-"))))


@cache
def adapter() -> str:
    """An adapter of random weights."""
    return written_adapter(adapter_weights(WIDTH), WIDTH, heads=4)


@cache
def shuffled() -> str:
    """The bundled draft under another tokenizer."""
    return str(write_shuffled_draft(Path(mkdtemp(prefix="paceline-strict-")) / "shuffled"))
