"""Hybrid models under drafting: are the texts those of transformers and of plain decoding, and are states given back?

usage: hybrid_exactness.py [--families lfm2 ...] [--operators] [--prompts 20] [--tokens 48] [--requests 1000]
                           [--sequences 8]

No published weights are used: each native family with recurrent states is made anew with six layers and random
weights, in float32. Its table and head are also those of a small attention model, the draft, so that a good part of
what that drafts is accepted and texts do not repeat themselves at once.

greedy      every prompt under every setting of `SETTINGS`, alone and all in batches, against transformers' `generate`,
            and against plain decoding; differences at near ties are counted, with the widest margin
also        n = 2 at temperature 0 and with seeds, streams that are closed in the middle while others go on, and texts
            under a JSON schema: the tokens of plain decoding
sampled     drawn drafts in trees: outputs against the probabilities that transformers gives them, in float64, by a
            test with a declared error
memory      what is kept behind each hundred of --requests requests: states of mixers, blocks of keys, resident memory
controls    states that are not committed, a tree read as a chain, states that something holds, a sampler that forgets
            what it has refused: each check must fail

Exits with 1 where a check fails, or a control does not. `--operators` leaves compiled passes out.

Results: `results/hybrid_exactness.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from common import RESULTS, kept, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from paceline import LLM, SamplingParams
from paceline.models.layers.mixers import step
from paceline.models.passes import mixer_tables
from paceline.models.state import recurrent
from paceline.verifiers import recursive_rejection
from paceline.verify import Agreement, Sampling, differences, first_difference, plain_from, uniform_test

SIZES = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
DELTA |= {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS = MOE | {"shared_expert_intermediate_size": 48}
LFM2 = {"layer_types": ["conv", "conv", "full_attention"] * 2, "conv_L_cache": 3}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_head": 32, "mamba_chunk_size": 16}
GRANITE = {"layer_types": ["mamba", "mamba", "attention"] * 2, "shared_intermediate_size": 160}
MAMBA = {"intermediate_size": 256, "state_size": 16, "time_step_rank": 8}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
JAMBA |= {"mamba_d_state": 16}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32}
NEMOTRON |= {"chunk_size": 16, "time_step_min": 1e-30}  # below which transformers takes no step in longer passes
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}
KIMI = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": None}
KIMI |= {"num_experts": 4, "moe_intermediate_size": 48, "num_shared_experts": 1, "num_expert_group": 2}
KIMI |= {"topk_group": 1, "num_experts_per_token": 2, "num_key_value_heads": 4, "linear_head_dim": 16}
KIMI |= {"linear_num_heads": 2, "linear_conv_kernel_dim": 4}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": LFM2,
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "granitemoehybrid": MAMBA2 | GRANITE | {"num_local_experts": 0},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 256},
    "lfm2_moe": LFM2 | MOE | {"num_dense_layers": 1},
    "bamba": MAMBA2 | {"attn_layer_indices": [2, 5]},
    "jamba": JAMBA | MOE,
    "nemotron_h": NEMOTRON,
    "kimi_linear": KIMI | {"layer_types": DELTA["layer_types"]},
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 16},
}
"""Families by `model_type`, and what their configurations have beside `SIZES`."""

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yes", "no"]}, "b": {"type": "boolean"},
          "c": {"enum": [1, 22, 333]}}, "required": ["a", "b", "c"], "additionalProperties": False}  # fmt: skip
SAMPLED, EACH, LENGTH, ERROR = 6, 64, 8, 1e-4
"""Of the tests of sampling: prompts, outputs of each, tokens of an output, and the chance of a false alarm."""

MARGIN = 1e-3
"""Logits closer than this are a near tie, in float32: other orders of summing differ by less."""


def tokenizer(folder: Path) -> int:
    """Write one whose tokens are bytes; returns how many it has."""
    bytes_, special = sorted(pre_tokenizers.ByteLevel.alphabet()), ["<unk>", "<s>", "</s>"]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *bytes_])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return len(special) + len(bytes_)


def written(family: str, config: Mapping[str, Any], folder: Path, seed: int) -> Any:
    """Write a random checkpoint with its tokenizer; returns the transformers model.

    Table and head are the same for all seeds, and their size against what layers add is that at which a model of
    another seed often has the same best token, and a text rarely repeats itself.
    """
    folder.mkdir(parents=True)
    size = tokenizer(folder)
    made = AutoConfig.for_model(family, vocab_size=size, **{**SIZES, **ENDS, **config})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    own, shared = (torch.Generator().manual_seed(one) for one in (seed, 0))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(0.2 * torch.randn(value.shape, generator=own))
            else:
                value.copy_(torch.randn(value.shape, generator=own) * value.shape[-1] ** -0.5)
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        table.copy_(12.0 * torch.randn(table.shape, generator=shared))
        head.copy_(3.0 * torch.randn(head.shape, generator=shared) * head.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def settings(draft: Path) -> dict[str, Any]:
    """speculative_config by name."""
    model = {"method": "draft_model", "model": str(draft)}
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        "suffix": {"method": "suffix", "num_speculative_tokens": 6},
        "draft chains": model | {"num_speculative_tokens": 3},
        "draft trees": model | {"tree_policy": "static", "speculative_token_tree": TREE},
        "drawn trees": model | {"tree_width": 2, "num_speculative_tokens": 3},
        "auto": "auto",
    }


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Of 2 to 80 tokens; every second one repeats a part of itself."""
    dice, made = random.Random(0), []
    for number in range(count):
        part = [dice.randrange(3, 259) for _ in range(dice.randint(2, 40))]
        made.append({"prompt_token_ids": part * (1 + number % 2)})
    return made


class Family:
    """A hybrid model with its draft.

    Attributes:
        oracle, draft: the transformers models.
    """

    def __init__(self, name: str, folder: Path, given: argparse.Namespace) -> None:
        self.name, self.tokens, self.prompts = name, given.tokens, prompts(given.prompts)
        self.oracle = written(name, FAMILIES[name], folder / "target", seed=1)
        self.draft = written("llama", {"num_hidden_layers": 2, "head_dim": 32}, folder / "draft", seed=2)
        with patch.dict(os.environ, {"PACELINE_COMPILED": str(int(not given.operators))}):
            more = {"profile": False, "max_num_seqs": given.sequences}
            self.llm = LLM(folder / "target", speculative_config=None, dtype="float32", **more)
        self.settings = settings(folder / "draft")

    @property
    def greedy(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=True)

    def under(self, setting: str) -> LLM:
        return self.llm.with_speculative_config(self.settings[setting])

    @cached_property
    def plain(self) -> list[list[int]]:
        """Texts of plain decoding, one prompt after the other."""
        return alone(self.llm, self.prompts, self.greedy)[0]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(t, v) of transformers, from one pass."""
        with torch.no_grad():
            found: torch.Tensor = self.oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def generated(self) -> list[list[int]]:
        """Texts of transformers."""
        made = []
        for prompt in self.prompts:
            ids = prompt["prompt_token_ids"]
            options = {"max_new_tokens": self.tokens, "do_sample": False}
            with torch.no_grad():
                whole = self.oracle.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
            made.append(whole[0, len(ids) :].tolist())
        return made


def texts(llm: LLM, given: Sequence[Any], params: Any) -> tuple[list[list[int]], Counter[str]]:
    """Texts of the first outputs, and what was drafted and accepted; a dropped drafter ends the run."""
    counts, found = Counter[str](), llm.generate(list(given), params, use_tqdm=False)
    for one in found:
        one.raise_for_error()
        if one.metrics.dropped_drafters:
            sys.exit(f"a drafter was dropped: {one.metrics.dropped_drafters}")
        counts.update(drafted=one.metrics.num_draft_tokens, accepted=one.metrics.num_accepted_tokens)
    return [list(one.outputs[0].token_ids) for one in found], counts


def alone(llm: LLM, given: Sequence[Any], params: SamplingParams) -> tuple[list[list[int]], Counter[str]]:
    """As `texts`, one prompt after the other."""
    found, counts = list[list[int]](), Counter[str]()
    for prompt in given:
        (one,), more = texts(llm, [prompt], params)
        found.append(one)
        counts += more
    return found, counts


def agreement(family: Family, found: Sequence[list[int]]) -> Agreement:
    """Texts against those of plain decoding."""
    seen = Agreement()
    for prompt, plain, text in zip(family.prompts, family.plain, found, strict=True):
        ids = prompt["prompt_token_ids"]
        seen.add(text, differences(family.llm.runner, ids, plain, text, plain_from(family.llm, ids, family.greedy)))
    return seen


def against_transformers(family: Family) -> dict[str, Any]:
    """Plain texts against those of `generate`; where they part, how close the logits are in transformers."""
    margins = []
    for prompt, wanted, text in zip(family.prompts, family.generated(), family.plain, strict=True):
        if text != wanted:
            at = next(i for i, (a, b) in enumerate(zip(wanted, text, strict=True)) if a != b)
            row = family.logits([*prompt["prompt_token_ids"], *wanted[:at]])[-1]
            margins.append(float(row[wanted[at]] - row[text[at]]))
    return {
        "texts": len(family.prompts),
        "equal": len(family.prompts) - len(margins),
        "near ties": sum(margin < MARGIN for margin in margins),
        "wrong": sum(margin >= MARGIN for margin in margins),
        "widest margin": max(margins, default=0.0),
    }


def greedy(family: Family) -> dict[str, Any]:
    """Every setting, alone and in batches."""
    rows: dict[str, Any] = {}
    for name in family.settings:
        for way, decode in (("alone", alone), ("in batches", texts)):
            found, counts = decode(family.under(name), family.prompts, family.greedy)
            seen = agreement(family, found)
            rows[f"{name}, {way}"] = {
                "equal": seen.identical, "near ties": seen.near_ties, "wrong": seen.wrong,
                "widest margin": max((one.gap for each in seen.differences.values() for one in each), default=0.0),
                **counts,
            }  # fmt: skip
    return rows


def several(family: Family) -> dict[str, int]:
    """Two outputs a prompt, greedy and with seeds: how many differ elsewhere than at near ties."""
    llm, wrong = family.under("draft trees"), Counter[str](greedy=0, seeds=0)
    for found, plain in zip(llm.generate(family.prompts, replace(family.greedy, n=2), use_tqdm=False),
                            family.plain, strict=True):  # fmt: skip
        for output in found.outputs:
            one = first_difference(family.llm.runner, found.prompt_token_ids, plain, output.token_ids)
            wrong["greedy"] += one is not None and not one.near_tie
    drawn = [replace(family.greedy, n=2, temperature=0.8, seed=number) for number in range(len(family.prompts))]
    pairs = zip(*(one.generate(family.prompts, drawn, use_tqdm=False) for one in (family.llm, llm)), strict=True)
    for number, (plain, found) in enumerate(pairs):
        for index, (a, b) in enumerate(zip(plain.outputs, found.outputs, strict=True)):
            sampling = Sampling(0.8, number, index)
            ids = plain.prompt_token_ids
            one = first_difference(family.llm.runner, ids, a.token_ids, b.token_ids, sampling=sampling)
            wrong["seeds"] += one is not None and not one.near_tie
    return dict(wrong)


def cancelled(family: Family) -> dict[str, int]:
    """Streams that are closed after a few chunks, in the middle of a batch that must not notice."""
    llm, found = family.under("draft trees"), list[list[int]]()
    batch = Thread(target=lambda: found.extend(texts(llm, family.prompts, family.greedy)[0]))
    batch.start()
    closed = 0
    while batch.is_alive() or not closed:
        stream = llm.stream(family.prompts[closed % len(family.prompts)], family.greedy)
        for _ in range(1 + closed % 4):
            next(stream)
        stream.close()
        closed += 1
    batch.join()
    again = texts(llm, family.prompts, family.greedy)[0]
    return {"closed": closed, "wrong": sum(agreement(family, one).wrong for one in (found, again)), **left(family)}


def constrained(family: Family) -> dict[str, int]:
    """Texts under a JSON schema, drafted in trees: those of plain decoding, and valid."""
    rules = {"json": SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0.0, max_tokens=96, structured_outputs=rules)
    plain, found = (family.under(name).generate(family.prompts, params, use_tqdm=False)
                    for name in ("plain", "draft trees"))  # fmt: skip
    return {
        "texts": len(found),
        "equal": sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(plain, found, strict=True)),
        "valid": sum(set(json.loads(one.outputs[0].text)) == {"a", "b", "c"} for one in found),
        "accepted": sum(one.metrics.num_accepted_tokens for one in found),
    }


def sampled(family: Family) -> dict[str, Any]:
    """The test of sampling, and what it finds of a sampler that forgets what it has refused."""
    with no_residual():
        wrong = drawn_texts(family)
    return {**drawn_texts(family), "p without a residual": wrong["p"]}


def drawn_texts(family: Family) -> dict[str, Any]:
    """Drafts are drawn, in trees. Tokens are put in the order in which the target prefers them to the draft, and each
    that was sampled gets the probability of those before it and a random part of its own: under exact sampling these
    are uniform (paceline.verify.sampling_test), and a sampler that favours drafts moves them up.
    """
    llm, noise = family.under("drawn trees"), torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, n=EACH, ignore_eos=True)
    accepted, values = 0, list[torch.Tensor]()
    for found in llm.generate(family.prompts[:SAMPLED], params, use_tqdm=False):
        accepted += found.metrics.num_accepted_tokens
        ids = torch.tensor(found.prompt_token_ids).expand(EACH, -1)
        drawn = torch.tensor([output.token_ids for output in found.outputs])
        target, draft = (_chances(model, ids, drawn) for model in (family.oracle, family.draft))
        order = target / draft
        before = torch.where(order > order.gather(2, drawn.unsqueeze(-1)), target, 0.0).sum(-1)
        own = target.gather(2, drawn.unsqueeze(-1)).squeeze(-1)
        values.append((before + own * torch.rand(own.shape, generator=noise, dtype=torch.float64)).flatten())
    made = uniform_test(torch.cat(values))
    return {"tokens": made.tokens, "accepted": accepted, "p": made.p_value}


@torch.no_grad()
def _chances(model: Any, ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """(outputs, tokens, v) float64 probabilities of what was drawn behind a prompt."""
    logits = model(torch.cat([ids, drawn[:, :-1]], 1), use_cache=False).logits[:, -drawn.shape[1] :]
    return torch.as_tensor(logits.double().softmax(-1))


def left(family: Family) -> dict[str, int]:
    """States of mixers that anything still holds, and blocks of keys in use."""
    gc.collect()
    states = sum(type(one) is recurrent.LayerState for one in gc.get_objects())
    return {"states": states, "blocks": family.llm.runner.memory.used}


def memory(family: Family, requests: int) -> dict[str, Any]:
    """What is left behind each hundred requests under trees, in batches of mixed lengths."""
    llm, process, rows = family.under("draft trees"), psutil.Process(), []
    params = replace(family.greedy, max_tokens=8)
    for start in range(0, requests, 100):
        texts(llm, [family.prompts[(start + i) % len(family.prompts)] for i in range(100)], params)
        rows.append({**left(family), "megabytes": process.memory_info().rss / 2**20})
    return {
        "requests": requests,
        "states": max(row["states"] for row in rows),
        "blocks": [rows[0]["blocks"], rows[-1]["blocks"]],
        "megabytes": [round(row["megabytes"], 1) for row in rows],
    }


@contextmanager
def uncommitted() -> Iterator[None]:
    """States forget what was accepted."""

    def counting(part: recurrent.RecurrentPart, path: Sequence[int]) -> None:
        part.length, part.scored = part.length + 1 + len(path), 0

    with patch.object(recurrent.RecurrentPart, "commit", counting):
        yield


@contextmanager
def tree_as_chain() -> Iterator[None]:
    """Every node reads the state behind the node before it, whatever its parent is."""
    apply = step.apply

    def chained(state: Any, before: Any, new: Any, sees: torch.Tensor) -> Any:
        return apply(state, before, new, torch.ones_like(sees).tril(sees.shape[1] - sees.shape[0]))

    def before(sees: Any) -> Any:
        return np.arange(-1, len(sees) - 1)

    def places(rows: Any, taps: int) -> list[slice]:
        return [slice(tap + rows.segment.done, tap + rows.segment.slots) for tap in range(taps)]

    with ExitStack() as broken:
        broken.enter_context(patch.object(step, "apply", chained))
        broken.enter_context(patch.object(step._Rows, "_places", places))
        broken.enter_context(patch.object(mixer_tables, "parents_of", before))
        yield


@contextmanager
def no_residual() -> Iterator[None]:
    """What was refused may be drawn again."""
    with patch.object(recursive_rejection, "residual", lambda rest, *_: rest):
        yield


@contextmanager
def held() -> Iterator[None]:
    """Something keeps what sequences give back."""
    keeps, release = list[Any](), recurrent.RecurrentPart.release

    def keeping(part: recurrent.RecurrentPart) -> None:
        keeps.append(part.layers)
        release(part)

    with patch.object(recurrent.RecurrentPart, "release", keeping):
        yield


def controls(family: Family) -> dict[str, Any]:
    """What each check finds where something is wrong."""
    found: dict[str, Any] = {}
    for name, broken in (("states not committed", uncommitted), ("tree read as a chain", tree_as_chain)):
        with broken():
            made, _ = texts(family.under("draft trees"), family.prompts, family.greedy)
        found[f"{name}: wrong texts"] = agreement(family, made).wrong
    with held():
        texts(family.under("draft trees"), family.prompts, replace(family.greedy, max_tokens=8))
        found["states held: states"] = left(family)["states"]
    return found


def grew(megabytes: Sequence[float]) -> bool:
    """Whether memory grew by more than 2 % behind the first third of a run."""
    return megabytes[-1] > 1.02 * megabytes[len(megabytes) // 3]


@dataclass(frozen=True)
class Check:
    """A part of the proof: what it finds, and whether that is wrong."""

    run: Callable[[Family, argparse.Namespace], dict[str, Any]]
    wrong: Callable[[dict[str, Any]], bool]


CHECKS: Mapping[str, Check] = {
    "transformers": Check(lambda family, _: against_transformers(family), lambda found: found["wrong"] > 0),
    "greedy": Check(
        lambda family, _: greedy(family),
        lambda found: any(row["wrong"] for row in found.values()) or not found["draft trees, in batches"]["accepted"],
    ),
    "n": Check(lambda family, _: several(family), lambda found: any(found.values())),
    "cancelled": Check(lambda family, _: cancelled(family), lambda found: found["wrong"] + found["states"] > 0),
    "grammar": Check(
        lambda family, _: constrained(family), lambda found: not found["texts"] == found["equal"] == found["valid"]
    ),
    "sampled": Check(
        lambda family, _: sampled(family),
        lambda found: not found["p without a residual"] < ERROR < found["p"] or not found["accepted"],
    ),
    "memory": Check(
        lambda family, given: memory(family, given.requests),
        lambda found: found["states"] > 0 or found["blocks"][0] != found["blocks"][1] or grew(found["megabytes"]),
    ),
    "controls": Check(
        lambda family, _: controls(family),
        lambda found: not all(found.values()),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=8, help="most in a batch")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.disable_progress_bar()
    failed = []
    for name in given.families:
        with tempfile.TemporaryDirectory() as folder:
            family = Family(name, Path(folder), given)
            passes, found = family.llm.runner.info.passes, {}
            for check in given.checks:
                found[check] = CHECKS[check].run(family, given)
                wrong = CHECKS[check].wrong(found[check])
                failed += [f"{name}: {check}"] if wrong else []
                print(name, passes, check, "WRONG" if wrong else "", json.dumps(found[check]), flush=True)
        key = f"{name}, {passes}"
        save("hybrid_exactness", kept("hybrid_exactness", given.folder) | {key: found}, given.folder, parts=[key])
    print(*failed, sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
