"""Keys of speculative_config: vLLM's, and what is said of one that nobody knows.

In: keys as a user wrote them, the keys that exist. Out: near matches, a ConfigError. Not here: who has which options
(`engine.policy`), values (`config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from paceline.errors import ConfigError

VLLM_KEYS = frozenset(
    """attention_backend code_revision disable_eagle_block_drop disable_logprobs disable_mqa_scorer
    disable_padded_drafter_batch draft_load_config draft_model_config draft_parallel_config draft_sample_method
    draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager
    index_share_for_mtp_iteration kv_cache_dtype max_model_len moe_backend num_speculative_tokens_per_batch_size
    parallel_drafting prompt_lookup_max prompt_lookup_min quantization rejection_sample_method revision
    speculative_token_tree suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length
    synthetic_acceptance_rate synthetic_acceptance_rates target_model_config target_parallel_config
    tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction""".split()  # noqa: SIM905 (a list would take a line for each)
)
"""vLLM's other keys. None says there that a key is not given, so it says the same here, whether the key is known or
not.
"""

NAMED: Final = 8
"""Most options, and most keys of all methods, that a message names where none is close."""

CLOSE: Final = 0.7
"""Least similarity (difflib's ratio) of what is offered instead."""


def near(key: object, known: Iterable[str]) -> list[str]:
    """Known keys that this one may have been meant to be, the closest first; upper case does not count."""
    return get_close_matches(str(key).lower(), list(dict.fromkeys(known)), n=2, cutoff=CLOSE)


def reject_unknown_keys(kind: str, given: Iterable[str], options: Sequence[str], general: Sequence[str]) -> None:
    """Refuse the first of `given` that is no option.

    Args:
        kind: what does not know it, for the message.
        options: of the method, and of the controller where they may stand there.
        general: keys that stand beside every method.
    Raises:
        ConfigError: with the closest of all these keys; where none is close, with the first of them.
    """
    for key in given:
        if key not in options:
            rest = [one for one in general if one != key and one not in options]
            close = near(key, [*options, *rest])
            known = f"known are {_some(sorted(options)) or 'no options'}; with every method also {_some(rest)}"
            hint = f"did you mean {' or '.join(close)}?" if close else known
            raise ConfigError(f"{kind} does not know {key!r}; {hint}")


def _some(names: Sequence[str]) -> str:
    """All names where they are few, else the first, how many more there are, and where they stand."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more (listed in the documentation)"
