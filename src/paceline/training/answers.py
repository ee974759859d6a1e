"""What a target says to prompts: the texts that drafters learn from, gathered once and kept line by line.

The file is JSONL, one answer a line, each on disk as soon as it is whole; a killed run goes on where it stopped.
Sampled answers have a temperature and a seed of their own, which follow from the prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.config import SamplingParams
from paceline.errors import PromptError
from paceline.training.shown import Shown
from paceline.utils import Conversation, read_prompts

if TYPE_CHECKING:
    from paceline.engine import ReadPrompt
    from paceline.llm import LLM

TOGETHER: Final = 64
"""Prompts whose answers are made together."""

TEMPERATURE: Final = 0.8
"""Of sampled answers."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """Asks a model that reads a source before it writes.

    Attributes:
        tokens: what its answer begins with. read: makes the prompt.
    """

    tokens: Ids
    read: Callable[[], ReadPrompt]


Asked = Mapping[str, "Ids | SourcePrompt"]
"""What is asked, by `TrainingText.id`."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Holds one text to learn from, which the target wrote or the user gave.

    Attributes:
        id: sha256 of the prompt's tokens, and of its source where it has one, by which a prompt is known.
        prompt, answer: token ids; a text that nobody asked for has no prompt.
        temperature: 0 where the likeliest tokens were taken.
    """

    id: str
    prompt: Ids
    answer: Ids
    temperature: float = 0.0


def prompts_of(llm: LLM, files: Sequence[Path], *, most: int | None, longest: int) -> dict[str, Ids]:
    """Prompts of files in the formats of `paceline bench`, as token ids by their `TrainingText.id`, each once.

    Args:
        most: prompts of each file; longest: tokens of a prompt, longer ones are left out.
    Raises:
        PromptError: a file that cannot be read, or no prompt that is short enough.
    """
    prompts: dict[str, Ids] = {}
    for file in files:
        for conversation in read_prompts(file).limited(most).conversations:
            ids = _ids(llm, conversation)
            if 1 < len(ids) <= longest:
                prompts.setdefault(_name(ids), ids)
    if not prompts:
        raise PromptError(f"no prompt of at most {longest} tokens in {', '.join(map(str, files))}; raise max_length")
    return prompts


def texts_of(llm: LLM, files: Sequence[Path], *, most: int | None) -> list[TrainingText]:
    """Texts of files as they are, for training without asking the target; of conversations
    that end with an answer, that answer.

    Raises:
        PromptError: as above.
    """
    texts: dict[str, TrainingText] = {}
    for file in files:
        for conversation in read_prompts(file).limited(most).conversations:
            ids = _ids(llm, conversation)
            prompt, text = ([], ids) if conversation.answer is None else (ids, _answer_ids(llm, conversation))
            if len(text) > 2:
                name = _name(prompt or text)
                texts.setdefault(name, TrainingText(name, prompt, text))
    if not texts:
        raise PromptError(f"no text of three tokens in {', '.join(map(str, files))}; give others")
    return list(texts.values())


def answered(
    llm: LLM, prompts: Asked, file: Path, *, max_tokens: int, sampled_share: float = 0.0
) -> list[TrainingText]:
    """The target's answers to prompts; those that the file holds are not asked for again.

    Args:
        file: JSONL of answers, made or gone on with.
        max_tokens: of an answer. sampled_share: of prompts whose answer is drawn at temperature 0.8.
    Raises:
        PromptError: a file of other lines. PacelineError: an answer that ended with an error.
    """
    known = {answer.id: answer for answer in _read(file)}
    left = [(name, asked) for name, asked in prompts.items() if name not in known]
    with Shown("answers", len(prompts), done=len(prompts) - len(left)) as shown:
        asking = _Asking(llm, file, known, shown, max_tokens, sampled_share)
        for start in range(0, len(left), TOGETHER):
            asking.make(left[start : start + TOGETHER], len(prompts) - len(left) + start)
    return [known[name] for name in prompts]


@dataclass(frozen=True, slots=True)
class _Asking:
    """Answers on their way into a file, and among those that are known."""

    llm: LLM
    file: Path
    known: dict[str, TrainingText]
    shown: Shown
    max_tokens: int
    sampled_share: float

    def make(self, prompts: Sequence[tuple[str, Ids | SourcePrompt]], before: int) -> None:
        """Answer prompts together; `before` were answered before them."""
        heat = [TEMPERATURE if int(name[:8], 16) < self.sampled_share * 16**8 else 0.0 for name, _ in prompts]
        requests = []
        for (name, asked), each in zip(prompts, heat, strict=True):
            seed = int(name[8:15], 16) if each else None
            params = SamplingParams(temperature=each, seed=seed, max_tokens=self.max_tokens)
            prompt = asked.read() if isinstance(asked, SourcePrompt) else {"prompt_token_ids": asked}
            request, decoder = self.llm.request(prompt, params)
            requests.append(request)

        def advance(done: int, _: int) -> None:
            for (name, asked), each, request in zip(prompts, heat, requests, strict=True):
                if request.finished and name not in self.known:
                    output = request.result()
                    output.raise_for_error()
                    ids = asked.tokens if isinstance(asked, SourcePrompt) else asked
                    self.keep(TrainingText(name, ids, list(output.outputs[0].token_ids), each))
            self.shown.update(before + done, f"{before + done} of {int(self.shown.total)}")

        decoder.run(requests, advance)

    def keep(self, answer: TrainingText) -> None:
        _append(self.file, answer)
        self.known[answer.id] = answer


def _ids(llm: LLM, conversation: Conversation) -> Ids:
    if conversation.token_ids is not None:
        return list(conversation.token_ids)
    if conversation.chat and llm.tokenizer.has_chat_template:
        return llm.chat_ids([*conversation.history, {"role": "user", "content": conversation.turns[0]}])
    return llm.tokenizer.encode(conversation.turns[0])


def _answer_ids(llm: LLM, conversation: Conversation) -> Ids:
    ids = llm.tokenizer.encode(conversation.answer or "", add_special_tokens=False)
    end = llm.tokenizer.eos_id
    return [*ids, end] if conversation.ended and end is not None else ids


def _name(ids: Sequence[int]) -> str:
    return sha256(json.dumps(list(ids)).encode()).hexdigest()


def _append(file: Path, answer: TrainingText) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(f"{json.dumps(asdict(answer))}\n".encode())
        out.flush()
        os.fsync(out.fileno())


def _read(file: Path) -> list[TrainingText]:
    """The whole lines of a file; a line that a kill has cut off is taken away."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    try:
        return [TrainingText(**json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError) as error:
        raise PromptError(f"{file} holds something else than answers ({error}); name another folder") from None
