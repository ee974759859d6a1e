"""Checks of checkpoints: end tokens, sampling defaults, and whether drafter and target speak the same tokens.

In: Facts. Out: complaints. Not here: speed, acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.bench.doctor.facts import Complaint, DraftFacts, Facts
from paceline.errors import PacelineError
from paceline.models.loading import Tokenizer, same_tokenizer

SAMPLE: Final = "The 3 quick foxes (aged 12,345.67 days) can't jump:\n\n    def jump(self):  # größer\n\treturn None\n"
TALK: Final = ({"role": "user", "content": "Hello."},)
ANSWER: Final = "Hi there."
FAMILY: Final = "take a draft model of the target's family"


def end_tokens(facts: Facts) -> Iterator[Complaint]:
    """No end token at all, or not the one that closes an answer in the chat template."""
    target = facts.target
    if not target.eos_ids:
        yield Complaint(
            "no end token is known, so texts end at --max-tokens only", "add eos_token_id to generation_config.json"
        )
        return
    closing = closing_token(target.tokenizer)
    if closing is not None and closing not in target.eos_ids:
        name = target.tokenizer.tokens().get(closing, "")
        yield Complaint(
            f"the chat template closes an answer with {name!r} (token {closing}), which is no end token "
            f"{list(target.eos_ids)}",
            "add it to eos_token_id in generation_config.json, or pass --stop-token-ids",
        )


def closing_token(tokenizer: Tokenizer) -> int | None:
    """The special token that follows an answer in the chat template; None where there is none, or no template."""
    try:
        before = tokenizer.apply_chat_template(TALK)
        after = tokenizer.apply_chat_template(
            [*TALK, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False
        )
    except PacelineError:  # no template, or one that refuses this talk: nothing to compare
        return None
    _, found, rest = after.partition(ANSWER)
    if not found or not after.startswith(before[: len(before) // 2]):
        return None
    tokens = tokenizer.encode(rest.lstrip(), add_special_tokens=False)
    return tokens[0] if tokens and tokens[0] in tokenizer.special_ids else None


def sampling_defaults(facts: Facts) -> Iterator[Complaint]:
    """A checkpoint that samples unless told otherwise."""
    temperature = facts.target.sampling.get("temperature")
    if facts.target.sampling.get("top_k") == 1 or temperature is None or temperature == 0:
        return
    yield Complaint(
        f"generation_config.json samples by default (temperature {temperature:g}), where fewer guesses stand than at 0",
        "pass --temperature 0 if that is what you want",
        hint=True,
    )


def setup(facts: Facts) -> Iterator[Complaint]:
    """A configuration that cannot be built, or a drafter that fails, for whatever reason."""
    unreadable = [draft for draft in facts.drafts if draft.tokenizer is None]
    for draft in unreadable:
        yield Complaint(
            f"draft model {draft.name} cannot be opened: {draft.error}", "give the folder or hub id of a checkpoint"
        )
    if facts.error and not unreadable:
        yield Complaint(facts.error, "correct --speculative-config")
    for probe in facts.probes:
        if probe.dropped:
            yield Complaint(
                f"drafter {probe.drafter} failed: {probe.dropped}", "report it with --log-level debug, or leave it out"
            )


def tokenizer(facts: Facts) -> Iterator[Complaint]:
    """Another vocabulary, or other rules of splitting text."""
    mine = facts.target.tokenizer
    for draft, theirs in _readable(facts):
        why = same_tokenizer(mine, theirs)
        if why is not None:
            yield Complaint(f"{_short(draft)} has another vocabulary: {why}", FAMILY)
        elif (a := mine.encode(SAMPLE, False)) != (b := theirs.encode(SAMPLE, False)):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            yield Complaint(f"{_short(draft)} splits text otherwise: a sample differs from token {at} on", FAMILY)


def special_tokens(facts: Facts) -> Iterator[Complaint]:
    """Named tokens (start, end) that are others in the draft."""
    mine = facts.target.tokenizer
    for draft, theirs in _readable(facts):
        for name, a, b in (("start", mine.bos_id, theirs.bos_id), ("end", mine.eos_id, theirs.eos_id)):
            if a is not None and b is not None and a != b:
                yield Complaint(
                    f"the {name} token is {a} in the target, {b} in {_short(draft)}",
                    "correct its tokenizer_config.json, or " + FAMILY,
                )
        odd = {i for i in mine.special_ids ^ theirs.special_ids if i < min(mine.vocab_size, theirs.vocab_size)}
        if odd:
            first = min(odd)
            where = "the target" if first in mine.special_ids else _short(draft)
            yield Complaint(f"token {first} is special in {where} only (and {len(odd) - 1} more)", FAMILY, hint=True)


def chat_template(facts: Facts) -> Iterator[Complaint]:
    """Messages that the draft was trained to see in another form."""
    mine = facts.target.tokenizer
    if not mine.has_chat_template:
        return
    for draft, theirs in _readable(facts):
        if not theirs.has_chat_template:
            yield Complaint(
                f"{_short(draft)} has no chat template, the target has one", "take a chat version as draft", hint=True
            )
            continue
        try:
            texts = [one.apply_chat_template(TALK) for one in (mine, theirs)]
        except PacelineError as error:
            yield Complaint(f"a chat template refuses a plain message: {error}", "correct the template", hint=True)
            continue
        if texts[0] != texts[1]:
            ids = [one.encode(text, False) for one, text in zip((mine, theirs), texts, strict=True)]
            marks = [[i for i in row if i in one.special_ids] for one, row in zip((mine, theirs), ids, strict=True)]
            kind = "other wording" if marks[0] == marks[1] else "other special tokens"
            yield Complaint(
                f"{_short(draft)} writes chat messages in another form ({kind})",
                "take a draft that was trained on the target's form",
                hint=marks[0] == marks[1],
            )


def _readable(facts: Facts) -> Iterator[tuple[DraftFacts, Tokenizer]]:
    return ((draft, draft.tokenizer) for draft in facts.drafts if draft.tokenizer is not None)


def _short(draft: DraftFacts) -> str:
    return f"draft {Path(draft.name).name!r}"
