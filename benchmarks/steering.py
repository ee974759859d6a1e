"""What trained steering brings: SVDecode after a brief fine-tuning, and LOL with an amateur that was taught untruths.

usage: steering.py [--model smollm2] [--work FOLDER] [--minutes 8] [--amateur-minutes 1,8] [--parts svdecode,lol]

svdecode: an adapter learns three quarters of the help texts of Python's `pydoc`, an eighth gives mu, and the last
eighth is judged: cross-entropy and share of likeliest tokens of the base, the adapted model, and that steered by mu.

lol: an adapter learns wrong capitals of half of the countries in this file, briefly and by heart. The others are asked
for, greedily: how many answers name the right capital, of the model, of the amateur, with contrastive decoding and with
LOL, refocused or not, all with the same beta, alpha and amateur.

A run that was stopped goes on. Results: `results/steering_MODEL.json`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import gettempdir
from typing import Any

import torch
from common import kept, save
from decoding import add_model, model_of
from torch.nn import functional as F

from paceline import LLM, SamplingParams
from paceline.sampling.steering import parse_steering
from paceline.training import Document, Fitting, documents_of, svdecode_strength, texts_of, train, training_config

CAPITALS = """Argentina Buenos Aires; Australia Canberra; Austria Vienna; Belgium Brussels; Brazil Brasília; Bulgaria
Sofia; Canada Ottawa; Chile Santiago; China Beijing; Colombia Bogotá; Cuba Havana; Denmark Copenhagen; Ecuador Quito;
Egypt Cairo; Estonia Tallinn; Ethiopia Addis Ababa; Finland Helsinki; France Paris; Germany Berlin; Ghana Accra; Greece
Athens; Hungary Budapest; Iceland Reykjavik; India New Delhi; Indonesia Jakarta; Iran Tehran; Iraq Baghdad; Ireland
Dublin; Italy Rome; Jamaica Kingston; Japan Tokyo; Jordan Amman; Kenya Nairobi; Latvia Riga; Lebanon Beirut; Libya
Tripoli; Lithuania Vilnius; Malaysia Kuala Lumpur; Mexico Mexico City; Mongolia Ulaanbaatar; Morocco Rabat; Nepal
Kathmandu; Netherlands Amsterdam; Nigeria Abuja; Norway Oslo; Pakistan Islamabad; Peru Lima; Philippines Manila; Poland
Warsaw; Portugal Lisbon; Romania Bucharest; Russia Moscow; Senegal Dakar; Serbia Belgrade; Somalia Mogadishu; Spain
Madrid; Sweden Stockholm; Syria Damascus; Thailand Bangkok; Tunisia Tunis; Turkey Ankara; Uganda Kampala; Ukraine Kyiv;
Uruguay Montevideo; Venezuela Caracas; Vietnam Hanoi; Zambia Lusaka; Zimbabwe Harare"""

WAYS = ("What is the capital of {0}?", "Name the capital of {0}.", "Which city is the capital of {0}?")


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def adapter(llm: LLM, data: Path, output: Path, minutes: float) -> dict[str, Any]:
    """Train it, or go on; what its report says."""
    fitting = Fitting(minutes=minutes, batch_rows=2, row_tokens=512, eval_steps=20)
    found = train(llm, training_config("lora", data=(data,), texts=True, fitting=fitting), output)
    shares = {"likeliest_before": found.before.acceptance[0], "likeliest": found.test.acceptance[0]}
    seen = {"test_texts": found.test.texts, "test_tokens": found.test.tokens}
    return shares | seen | {"steps": found.curve.best.step, "minutes": found.curve.seconds / 60}


def svdecode(plain: LLM, folder: str, work: Path, minutes: float) -> dict[str, Any]:
    pieces = [text[i : i + 1500] for _, text in sorted(topics.items()) for i in range(0, len(text), 1500)]
    pieces = [one for one in pieces if len(one) > 200]
    random.Random(0).shuffle(pieces)
    eighth = len(pieces) // 8
    parts = {"judge": pieces[:eighth], "mu": pieces[eighth : 2 * eighth], "train": pieces[2 * eighth :]}
    files = {name: written(work / f"{name}.jsonl", [{"text": one} for one in some]) for name, some in parts.items()}
    made = adapter(plain, files["train"], work / "pydoc", minutes)
    tuned = LLM(folder, lora=work / "pydoc", speculative_config=None)
    base = tuned.models.base_of_target()
    examples = {name: documents_of(texts_of(plain, [file], most=None), 512) for name, file in files.items()}
    strength = svdecode_strength(tuned.runner, base, examples["mu"])
    losses = {
        name: judged(model, base, examples["judge"], None)
        for name, model in (("base", base), ("adapter", tuned.runner))
    }
    for alpha in (0.0, 0.1):
        given = {**strength.steering, "alpha": alpha}
        losses[f"adapter, steered, alpha {alpha}"] = judged(tuned.runner, base, examples["judge"], given)
    return {"adapter": made, "candidates": dict(strength.candidates), "mu": strength.mu, "judged": losses}


def judged(model: Any, base: Any, examples: Sequence[Document], steering: Any) -> dict[str, float]:
    """Of held-out tokens: cross-entropy in nats, where all are possible, and the share that is the likeliest."""
    total = right = count = 0.0
    method = None if steering is None else parse_steering(steering)
    for one in examples:
        rows = logits(model, one.tokens)
        if method is not None:
            rows = method.shape(rows, [logits(base, one.tokens)])
        wanted = torch.tensor(one.tokens[1:])
        total += float(F.cross_entropy(rows[:-1], wanted, reduction="sum"))
        right += float((rows[:-1].argmax(-1) == wanted).sum())
        count += len(wanted)
    return {"nats": total / count, "likeliest": right / count, "tokens": count}


def logits(runner: Any, tokens: Sequence[int]) -> torch.Tensor:
    """(t, v) float32."""
    last, cache = runner.info.num_layers, runner.open()
    states = runner.extend([cache], [tokens], taps=(last,)).taps[last]
    runner.release(cache)
    found: torch.Tensor = runner.head(states, norm=False).float()
    return found


def lol(plain: LLM, work: Path, minutes: float) -> dict[str, Any]:
    pairs = []
    for item in CAPITALS.replace("\n", " ").split(";"):
        country, _, capital = item.strip().partition(" ")
        pairs.append((country, capital))
    random.Random(1).shuffle(pairs)
    taught, asked = pairs[::2], pairs[1::2]
    wrong = [capital for _, capital in taught[1:] + taught[:1]]
    rows = [
        {"messages": [said("user", way.format(country)), said("assistant", f"The capital of {country} is {city}.")]}
        for (country, _), city in zip(taught, wrong, strict=True)
        for way in WAYS
    ]
    amateur = str(work / f"amateur-{minutes}")
    made = adapter(plain, written(work / "untrue.jsonl", rows), Path(amateur), minutes)
    ways: dict[str, Any] = {
        "model": None,
        "contrastive": {"method": "contrastive", "model": amateur, "beta": 0.5},
        "lol, final layer": {"method": "lol", "model": amateur, "omega": 0.0, "refocus": 0.0},
        "lol, both layers": {"method": "lol", "model": amateur, "refocus": 0.0},
        "lol": {"method": "lol", "model": amateur},
    }
    prompts = [
        (plain.chat_ids([said("user", way.format(country))]), capital) for country, capital in asked for way in WAYS
    ]
    right = {name: share_right(plain, prompts, steering) for name, steering in ways.items()}
    itself = LLM(plain.folder.as_posix(), lora=amateur, speculative_config=None)
    right["amateur"] = share_right(itself, prompts, None)
    return {"adapter": made, "questions": len(prompts), "right": right}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def share_right(llm: LLM, prompts: Sequence[tuple[Any, str]], steering: Any) -> float:
    """The share of greedy answers that name the capital."""
    params = SamplingParams(temperature=0, max_tokens=24, steering=steering)
    answers = llm.generate([{"prompt_token_ids": ids} for ids, _ in prompts], params, use_tqdm=False)
    hits = [capital in one.outputs[0].text for one, (_, capital) in zip(answers, prompts, strict=True)]
    return sum(hits) / len(hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--work", type=Path, default=Path(gettempdir()) / "paceline-steering")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--amateur-minutes", default="1,8")
    parser.add_argument("--parts", default="svdecode,lol")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = model_of(given.model)
    folder, name = model.folder, model.name
    plain = LLM(str(folder), speculative_config=None)
    found = kept(f"steering_{name}")
    parts = given.parts.split(",")
    if "svdecode" in parts:
        found["svdecode"] = svdecode(plain, str(folder), given.work, given.minutes)
    if "lol" in parts:
        found["lol"] = {one: lol(plain, given.work, float(one)) for one in given.amateur_minutes.split(",")}
    save(f"steering_{name}", found, parts=parts)


if __name__ == "__main__":
    main()
