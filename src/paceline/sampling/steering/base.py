"""What a method of steering is, and how one is chosen.

A row must come out the same whatever rows are beside it, or drafting would change what is drawn: operations stay within
rows, and sums over the vocabulary are rounded so that they are exact in any order (`exact_sums`).

Axes in this package: r = rows, v = vocabulary.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import torch

from paceline import registry
from paceline.errors import ConfigError
from paceline.utils import need, number, reject_unknown


class Steering(ABC):
    """Changes rows of logits by what other rows say of the same nodes.

    Attributes:
        name: of the method.
        companions: sequences whose rows are looked at: one of the target behind another "prompt", one of another
            "model" behind the same prompt. A method may look at layers (`taps`) beside them, or alone.
        model: folder or hub id of that other model, or folder of a LoRA adapter, which is the target with it; None is
            the target without the LoRA adapter that it was loaded with.
        prompt: text or token ids of that other prompt; None is the last token of the request's own.
        prepended: `prompt` goes before the request's own prompt instead of in its place.
        norm: states of layers go through the final norm before the head.
    """

    name: ClassVar[str]
    companions: Sequence[Literal["prompt", "model"]] = ()
    model: str | None = None
    prompt: str | Sequence[int] | None = None
    prepended: bool = False
    norm: bool = False

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers that are looked at, in the target and in the other model alike, as `Scores.taps` counts them: -1 the
        embeddings, 0 the first layer.

        Raises:
            ConfigError: layers that a model of `num_layers` does not have.
        """
        del num_layers
        return ()

    @abstractmethod
    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """(r, v) float32 logits of the steered distribution; no operation mixes rows.

        Args:
            rows_rv: float32 logits of the target; not written to.
            others: (r, v) float32 logits for the same nodes: one tensor for each of `taps` of the target, then for each
                of `companions` its own, and behind those of another model one for each of its `taps`.
        """


METHODS_HINT: Final = 'be the name of a method, or a dict as {"method": "cfg", "guidance_scale": 1.5}'


def parse_steering(given: Mapping[str, Any]) -> Steering:
    """A method with its options.

    Args:
        given: "method", a name of `registry.table("steerings")` or "module:Class" of a `Steering`, and its options.
    Raises:
        ConfigError: no such method, no such option, or a value outside its range.
    """
    method = given.get("method")
    need(isinstance(method, str), "steering", METHODS_HINT, given)
    made = registry.load("steerings", str(method))
    registry.check_derives("steerings", str(method), made, Steering)
    options = {key: value for key, value in given.items() if key != "method"}
    known = inspect.signature(made).parameters
    reject_unknown(f"option of steering method {method!r}", options, list(known))
    for name, one in known.items():
        lacks = one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and name not in options
        need(not lacks, "steering", f"give {name!r} with method {method!r}", given)
    try:
        found: Steering = made(**options)
    except TypeError as error:
        raise ConfigError(f"steering method {method!r}: {error}") from None
    return found


def need_alpha(alpha: float) -> None:
    """Reject what is no share of a probability.

    Raises:
        ConfigError: outside 0..1.
    """
    number("alpha", alpha, 0.0, 1.0, "be in 0..1")


def need_model(name: str, model: object) -> None:
    """Reject what names no model.

    Raises:
        ConfigError: neither folder nor hub id.
    """
    need(isinstance(model, str) and model != "", name, "be a folder or hub id", model)


def only_plausible(shaped_rv: torch.Tensor, rows_rv: torch.Tensor, alpha: float) -> torch.Tensor:
    """`shaped_rv` where the target finds a token plausible, else what softmax makes 0 of: the target's logits, `FAR`
    below all that is plausible, so that a rule which leaves nothing plausible, as a grammar may, leaves these. Rows
    with NaN stay NaN where they were.
    """
    if alpha <= 0.0:
        return shaped_rv
    above_rv = rows_rv - rows_rv.amax(-1, keepdim=True)
    other_rv = above_rv < math.log(alpha)
    lowest_r1 = shaped_rv.masked_fill(other_rv, math.inf).amin(-1, keepdim=True)
    return torch.where(other_rv, lowest_r1 - FAR + above_rv, shaped_rv)


FAR: Final = 1e4


def exact_sums(terms_rv: torch.Tensor) -> torch.Tensor:
    """(r,) float64 sums of rows, the same bits in whatever order: terms are rounded to multiples of 2**-44.

    Args:
        terms_rv: whose magnitudes sum to less than 2**8 in each row.
    """
    return terms_rv.double().mul_(_SCALE).round_().sum(-1).div_(_SCALE)


_SCALE: Final = 2.0**44
