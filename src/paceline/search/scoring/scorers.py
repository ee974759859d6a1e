"""What judges texts, for all searches: a function, another language model, or a checkpoint that was trained to judge.

An option names a scorer as a callable, as "module:function", or as {"model": FOLDER} (or a hub id). What the checkpoint
is says how it judges:

- a causal language model: by the mean log-probability of a text behind its prompt;
- one for sequence classification (a reward model, a cross-encoder): by its one output, or with "label" by the
  log-probability of that label, of prompt and text as a pair;
- with "one_pass" such a checkpoint of BERT's family: all texts of a prompt in one pass (`search.scoring.uni_encoder`).

Weights come from safetensors files, and code that lies in a folder is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from paceline.checkpoints import resolve
from paceline.errors import PromptError
from paceline.search.named import named, numbers
from paceline.search.scoring.classifiers import ClassifierScorer, is_classifier
from paceline.search.scoring.likelihood import candidate_logprobs
from paceline.search.scoring.uni_encoder import UniEncoder
from paceline.utils import integer, need, reject_unknown

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.drafters import Models
    from paceline.models import Runner
    from paceline.search.branch import Branch

Judgement = Callable[[Sequence[str]], Sequence[float]]
GivenScorer = Judgement | str | Mapping[str, Any]

NO_TOKENS: Final = -1e4
"""Nats a token: of a text that adds nothing to its prompt, less than any other has."""


class Scorer(Protocol):
    """Judges texts: the higher the better."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """One number for each text that follows a prompt."""


class FunctionScorer:
    """Asks a function of the texts behind the prompt.

    Args:
        option: its name, for messages.
    """

    def __init__(self, option: str, function: Judgement) -> None:
        self.option, self.function = option, function

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return numbers(self.option, self.function(texts), len(texts))


class LikelihoodScorer:
    """Mean log-probability (nats) of each text behind the prompt, under a language model of any tokenizer: all texts in
    one pass as a token tree.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self.runner, self.tokenizer = runner, tokenizer

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        whole = [self.tokenizer.encode(prompt + text) for text in texts]
        start = _common([self.tokenizer.encode(prompt), *whole])
        if not start:
            raise PromptError("prompt and texts begin with no common token under the scorer; give a longer prompt")
        rows = candidate_logprobs(self.runner, whole[0][:start], [tokens[start:] for tokens in whole])
        return [float(row.mean()) if len(row) else NO_TOKENS for row in rows]


_OPENED: Final = WeakKeyDictionary[Any, dict[tuple[Any, ...], Scorer]]()
"""By what opens models beside a target, whose lifetime they share."""


class NamedScorer:
    """A scorer as an option names it, checked and not yet opened.

    Args:
        option: its name, for messages. scorer: see the module.
    Raises:
        ConfigError: none of the forms.
    """

    def __init__(self, option: str, scorer: GivenScorer) -> None:
        self.option = option
        self._ready: Scorer | None = None
        if not isinstance(scorer, Mapping):
            self._ready = FunctionScorer(option, named(option, scorer))
            return
        reject_unknown(f"key of {option}", scorer, ("model", "label", "one_pass"))
        self.model, self.label, self.one_pass = scorer.get("model"), scorer.get("label"), scorer.get("one_pass", False)
        need(isinstance(self.model, str), f"{option} model", "be a folder or hub id", self.model)
        need(isinstance(self.one_pass, bool), f"{option} one_pass", "be true or false", self.one_pass)
        if self.label is not None:
            integer(f"{option} label", self.label, 0)

    def scores(self, models: Models, prompt: str, texts: Sequence[str]) -> list[float]:
        """What it makes of texts that follow a prompt, the higher the better.

        Raises:
            ConfigError: not a finite number for each.
        """
        return numbers(self.option, self.open(models).scores(prompt, texts), len(texts))

    def open(self, models: Models) -> Scorer:
        """The scorer; a model is opened once for all searches around a target.

        Raises:
            CheckpointError, UnsupportedModelError, ConfigError: no model that can judge.
        """
        if self._ready is None:
            opened = _OPENED.setdefault(models, {})
            key = (self.model, self.label, self.one_pass)
            if key not in opened:
                opened[key] = self._opened(models)
            self._ready = opened[key]
        return self._ready

    def _opened(self, models: Models) -> Scorer:
        name = str(self.model)
        folder = resolve(name)
        judges = is_classifier(folder)
        if self.one_pass:
            need(judges, f"{self.option} one_pass", "be left out for a model that is no classifier", True)
            return UniEncoder.load(folder, name)
        if judges:
            return ClassifierScorer(folder, name, self.label)
        need(self.label is None, f"{self.option} label", "be left out for a causal language model", self.label)
        return LikelihoodScorer(models.open(name, other_tokens=True), models.tokenizer_of(name))


def prompt_of(branch: Branch, tokenizer: Tokenizer) -> str:
    """The text of the prompt that a branch goes on from."""
    request = branch.request
    return tokenizer.decode(request.prompt_ids) if request.prompt is None else request.prompt


def _common(texts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all have."""
    return next((i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), min(map(len, texts)))
