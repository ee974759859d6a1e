"""What Whisper's logits and texts say about a window: its language, whether anybody speaks, how sure the text is.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), section 4.5, and its code.
Axes in this file: n = sampled tokens, v = vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from paceline.speech.whisper_rule import WhisperRule
from paceline.speech.whisper_tokens import WhisperTokens


def language_probabilities(logits_v: torch.Tensor, tokens: WhisperTokens) -> dict[str, float]:
    """Code of each language -> probability among them, the most likely first.

    Args:
        logits_v: (v,) raw logits after `tokens.start` alone.
    Returns:
        English alone for an English-only model.
    """
    if not tokens.multilingual:
        return {"en": 1.0}
    ids = torch.tensor(list(tokens.languages.values()), device=logits_v.device)
    chances = logits_v.float()[ids].softmax(0).tolist()
    return dict(sorted(zip(tokens.languages, chances, strict=True), key=lambda pair: -pair[1]))


def no_speech_probability(logits_v: torch.Tensor, tokens: WhisperTokens) -> float:
    """How likely nobody speaks in this window.

    Args:
        logits_v: (v,) raw logits after `tokens.start` of the window's own prompt, not after its last token.
    """
    return float(logits_v.float().softmax(0)[tokens.no_speech])


def average_logprob(rule: WhisperRule, logits_nv: torch.Tensor, sampled: Sequence[int], tokens: WhisperTokens) -> float:
    """Mean log-probability of what was sampled, at temperature 1 and after the rule; the end counts as a token even
    where the text was cut before it.

    Args:
        rule: at the beginning of the window; it is not advanced.
        logits_nv: (n, v) raw logits of the rows that the tokens were sampled from; never written to.
        sampled: n tokens, `tokens.end` included where it was sampled.
    """
    rows_nv = logits_nv.detach().to(torch.float32, copy=True)
    rule.apply(rows_nv, [sampled[:count] for count in range(len(sampled))], ())
    ids_n1 = torch.tensor(sampled, dtype=torch.int64, device=rows_nv.device)[:, None]
    total = float(rows_nv.log_softmax(1).gather(1, ids_n1).sum())
    return total / (sum(token != tokens.end for token in sampled) + 1)


def compression_ratio(text: str) -> float:
    """Bytes of a text by its bytes compressed with zlib: far above 2 where it repeats itself."""
    raw = text.encode("utf-8")
    return len(raw) / len(zlib.compress(raw))
