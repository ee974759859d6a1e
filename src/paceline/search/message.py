"""A message in sampled text: each token is drawn from a coupling of the model's distribution with the message.

Both ends know, for each byte of the message, how probable its values are after the tokens so far; at first all are
equally so. For each token the byte that is most uncertain is coupled with the model's next-token distribution, so that
each tells as much of the other as possible. The writer draws the token given the byte's value, the reader learns from
the token by Bayes' rule. Over all values of the byte the token's distribution is the model's own, so that the text is
as plain sampling would write it. With a `rate`, the byte goes through a bottleneck first.

The message is whitened with a keystream, because its bytes must be equally probable for that; a key is used once.

Both ends must compute the same bits: the same model, dtype, device, number of threads, and sampling parameters.

Sources: Minimum Entropy Coupling with Bottleneck (arXiv:2410.21666); Perfectly Secure Steganography Using Minimum
Entropy Coupling (arXiv:2210.14889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from paceline.errors import ConfigError, PromptError
from paceline.search.base import Search, Steps, mean_logprob, need_draws
from paceline.search.branch import Branch, Found
from paceline.search.coupling import Floats, Ids, bottleneck, entropy_bits, minimum_entropy_coupling
from paceline.utils import need, number
from paceline.utils import tokens as token_ids

if TYPE_CHECKING:
    from paceline.config import SamplingParams
    from paceline.engine import Prompt, RequestOutput

MOST_BYTES: Final = 4096
"""Of a message."""
HEADER: Final = 2
"""Bytes before the message, which say how long it is."""
DOUBT: Final = 1e-6
"""Probability of all other values below which a byte counts as known."""
MOST_TOKENS: Final = 1024
"""So many of the likeliest tokens are told apart; all others are one, of which one is drawn by itself."""


@dataclass(frozen=True, slots=True)
class Coupled:
    """What a byte's value says of the next token, and the token of the value.

    Attributes:
        index: of the byte. groups: (256,) of its values. joint: (groups, k + 1) with the k likeliest tokens and all
            others as one. chances: (v,) of the tokens. order: (v,) tokens, likeliest first.
    """

    index: int
    groups: Ids
    joint: Floats
    chances: Floats
    order: Ids

    def given(self, value: int) -> torch.Tensor:
        """(v,) float64 log-probabilities of the token for a value of the byte."""
        row, few = self.joint[self.groups[value]], self.joint.shape[1] - 1
        if not row.any():  # the value was as good as excluded
            return torch.from_numpy(self.chances).log()
        masses = np.zeros_like(self.chances)
        masses[self.order[:few]] = row[:few]
        rest = self.order[few:]
        if row[few] > 0.0:
            masses[rest] = self.chances[rest] * (row[few] / self.chances[rest].sum())
        return torch.from_numpy(masses / row.sum()).log()

    def likelihood(self, token: int) -> Floats:
        """(256,) probability of the token for each value of the byte."""
        few = self.joint.shape[1] - 1
        place = min(int(np.flatnonzero(self.order == token)[0]), few)
        rows = self.joint.sum(1)
        posterior: Floats = np.divide(self.joint[:, place], rows, out=np.zeros_like(rows), where=rows > 0.0)
        return posterior[self.groups]


class Channel:
    """What both ends know of a message after the tokens so far.

    Args:
        key: of the keystream. rate: most bits of the message that a token may tell; None for no limit.
    Attributes:
        size: bytes of the message; None while that is not known.
        beliefs: (n, 256) probability of each value of each byte, whitened, header included.
    """

    def __init__(self, key: bytes, rate: float | None = None) -> None:
        self.rate = float("inf") if rate is None else rate
        self.size: int | None = None
        self._pad = np.frombuffer(shake_256(b"paceline message" + key).digest(HEADER + MOST_BYTES), np.uint8)
        self.beliefs: Floats = np.full((HEADER, 256), 1 / 256)
        self._entropies: Floats = np.full(HEADER, 8.0)

    @property
    def done(self) -> bool:
        """Whether all bytes are known."""
        return self.size is not None and self.known == HEADER + self.size

    @property
    def known(self) -> int:
        """Bytes that are known, header included."""
        return int((self._entropies == 0.0).sum())

    def whitened(self, message: bytes) -> bytes:
        """Header and message under the keystream, or the other way round."""
        data = np.frombuffer(message, np.uint8)
        return (data ^ self._pad[: len(data)]).tobytes()

    def message(self) -> bytes:
        """The likeliest one, without its header."""
        return self.whitened(self.beliefs.argmax(1).astype(np.uint8).tobytes())[HEADER:]

    def coupled(self, logprobs: torch.Tensor) -> Coupled:
        """The byte that is most uncertain, coupled with the next token.

        Args:
            logprobs: (v,) of the token.
        """
        index = int(self._entropies.argmax())
        belief = self.beliefs[index]
        groups = bottleneck(belief, self.rate)
        chances: Floats = logprobs.double().exp().numpy()
        chances = chances / chances.sum()
        order = np.argsort(-chances, kind="stable")
        classes = np.append(chances[order[:MOST_TOKENS]], chances[order[MOST_TOKENS:]].sum())
        weights: Floats = np.bincount(groups, belief).astype(np.float64)
        joint = minimum_entropy_coupling(weights, classes)
        return Coupled(index, groups, joint, chances, order)

    def learn(self, coupled: Coupled, token: int) -> None:
        """Take in the token that was drawn.

        Raises:
            PromptError: it cannot have been drawn, or what it tells cannot be a header.
        """
        belief = self.beliefs[coupled.index] * coupled.likelihood(token)
        if (total := belief.sum()) <= 0.0:
            raise PromptError(
                f"token {token} cannot have been drawn there; give the model, prompt and params of the text"
            )
        belief /= total
        self.beliefs[coupled.index] = belief
        sure = belief.max() >= 1.0 - DOUBT
        self._entropies[coupled.index] = 0.0 if sure else entropy_bits(belief)
        if self.size is None and self.known == HEADER:
            self._open()

    def _open(self) -> None:
        """The header is known: as many bytes follow as it says."""
        header = self.whitened(self.beliefs.argmax(1).astype(np.uint8).tobytes())
        self.size = int.from_bytes(header, "big")
        if self.size > MOST_BYTES:
            raise PromptError(f"the tokens hold no message of at most {MOST_BYTES} bytes under this key")
        self.beliefs = np.concatenate([self.beliefs, np.full((self.size, 256), 1 / 256)])
        self._entropies = np.concatenate([self._entropies, np.full(self.size, 8.0)])


class HideMessage(Search):
    """Samples a text that tells a message; behind the message it is plain sampling.

    Args:
        channel: of the message, new. data: header and message, whitened.
    """

    name = "hide_message"
    keeps_beginnings = True

    def __init__(self, channel: Channel, data: bytes) -> None:
        super().__init__()
        self.channel, self.data = channel, data

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        need_draws(cls.name, params)
        need(params.n == 1, "n", "be 1: one text tells the message", params.n)

    def steps(self, root: Branch) -> Steps[None]:
        here, channel = root, self.channel
        while not (here.ended or self.over(here)):
            self.alive = [here]
            logprobs = (yield [here]).logprobs[0]
            coupled = None if channel.done else channel.coupled(logprobs)
            token = self.token(here, logprobs, coupled)
            if coupled is not None:
                channel.learn(coupled, token)
            here = here.child(token, float(logprobs[token]))
        self.alive, self.found = [], [Found(here, mean_logprob(here))]

    def over(self, here: Branch) -> bool:
        """Whether nothing more is to be done."""
        del here
        return False

    def token(self, here: Branch, logprobs: torch.Tensor, coupled: Coupled | None) -> int:
        """The next one."""
        if coupled is None or coupled.index >= len(self.data):
            return here.draw(logprobs, 0)
        return here.draw(coupled.given(self.data[coupled.index]), 0)


class ReadMessage(HideMessage):
    """Follows a text that tells a message, to where it is known.

    Args:
        channel: of the message, new. tokens: of the text.
    """

    name = "read_message"

    def __init__(self, channel: Channel, tokens: Sequence[int]) -> None:
        super().__init__(channel, b"")
        self.tokens = tokens

    def over(self, here: Branch) -> bool:
        return self.channel.done or here.length == len(self.tokens)

    def token(self, here: Branch, logprobs: torch.Tensor, coupled: Coupled | None) -> int:
        del coupled
        token = self.tokens[here.length]
        need(token < len(logprobs), "tokens", f"be below {len(logprobs)}", token)
        return token


class Decodes(Protocol):
    """What `LLM` is here."""

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: Any, *, search: Any) -> list[RequestOutput]:
        """See `LLM.generate`."""


@dataclass(frozen=True, slots=True)
class HiddenMessage:
    """A text that tells a message.

    Attributes:
        result: the text as `LLM.generate` returns it.
        complete: whether it tells the whole message; else it has ended before. Texts that were thrown away for that
            make the others differ from plain samples, by being longer.
        known_bytes: bytes that a reader knows, the two of the length included.
    """

    result: RequestOutput
    complete: bool
    known_bytes: int

    @property
    def text(self) -> str:
        """Of the output."""
        return self.result.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the output, for `read_message`."""
        return list(self.result.outputs[0].token_ids)


def hide_message(
    llm: Decodes, prompt: Prompt, message: bytes, params: SamplingParams, *, key: bytes, rate: float | None = None
) -> HiddenMessage:
    """Sample a text that tells a message to who knows the key, and is distributed as the model's own to all others.

    The key should have 16 random bytes or more, and hide one message only. Nothing proves who wrote the message, or
    that the key was right.

    Args:
        prompt: as for `LLM.generate`. message: at most `MOST_BYTES` bytes.
        params: temperature above 0, `n` 1; all rules hold. A text of `max_tokens` may be too short for the message.
        rate: bits of the message that a token may tell at most; None for no limit.
    Raises:
        PromptError, ConfigError: before anything runs.
        PacelineError: the text ended with an error.
    """
    _check(message, "message")
    need(len(message) <= MOST_BYTES, "message", f"have at most {MOST_BYTES} bytes", len(message))
    channel = _channel(key, rate)
    data = channel.whitened(len(message).to_bytes(HEADER, "big") + message)
    search = {"method": f"{__name__}:HideMessage", "channel": channel, "data": data}
    (result,) = llm.generate([_one(prompt)], params, False, search=search)
    result.raise_for_error()
    complete = channel.done and channel.message() == message
    return HiddenMessage(result, complete, channel.known)


def read_message(
    llm: Decodes, prompt: Prompt, tokens: Sequence[int], params: SamplingParams, *, key: bytes,
    rate: float | None = None,
) -> bytes:  # fmt: skip
    """The message that a text of `hide_message` tells.

    Args:
        prompt, params, key, rate: those of the text; `seed` and `max_tokens` do not matter.
        tokens: its token ids. Its characters will not do: the same text may have other tokens.
    Raises:
        PromptError: the tokens do not tell a whole message.
        PacelineError: they are not of this model, prompt and parameters, or of another key.
        ConfigError: a bad argument.
    """
    listed = list(token_ids("tokens", tokens))
    need(len(listed) > 0, "tokens", "hold a token or more", tokens)
    channel = _channel(key, rate)
    params = replace(params, max_tokens=len(listed))
    search = {"method": f"{__name__}:ReadMessage", "channel": channel, "tokens": listed}
    (result,) = llm.generate([_one(prompt)], params, False, search=search)
    result.raise_for_error()
    if not channel.done:
        wanted = "" if channel.size is None else f" of {HEADER + channel.size}"
        raise PromptError(f"the tokens tell {channel.known}{wanted} bytes of a message; give all tokens of the text")
    return channel.message()


def _channel(key: bytes, rate: float | None) -> Channel:
    _check(key, "key")
    need(len(key) > 0, "key", "have a byte or more", key)
    if rate is not None:
        number("rate", rate, 0.0, 1e3, "be above 0, in bits", open_low=True)
    return Channel(key, rate)


def _one(prompt: Prompt) -> Prompt:
    several = isinstance(prompt, list | tuple) and not all(isinstance(token, int) for token in prompt)
    need(not several, "prompt", "be one prompt", prompt)
    return prompt


def _check(value: object, name: str) -> None:
    if not isinstance(value, bytes):
        raise ConfigError(f"{name} must be bytes, got {type(value).__name__}")
