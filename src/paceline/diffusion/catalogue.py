"""The literal tables of diffusion decoding: parts by name, and methods as compositions of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS: Mapping[str, Mapping[str, str]] = {
    "schedule": {
        "blocks": "schedule:Blocks",
        "sliding": "schedule:SlidingSchedule",
        "ahead": "schedule:BlocksAhead",
        "ascending": "schedule:AscendingBlocks",
        "progressive": "schedule:ProgressiveBlocks",
        "held_blocks": "schedule:HeldBlocks",
    },
    "score": {
        "confidence": "score:ConfidenceScore",
        "margin": "score:MarginScore",
        "entropy": "score:EntropyScore",
        "random": "score:RandomScore",
        "leftmost": "score:LeftmostScore",
    },
    "correction": {"repetition_guard": "score:RepetitionGuard"},
    "modifier": {
        "eoser": "score:EndRamp",
        "eos_bar": "score:EndBar",
        "order_noise": "score:OrderNoise",
    },
    "commit": {
        "quota": "commit.quotas:QuotaCommit",
        "threshold": "commit.thresholds:ThresholdCommit",
        "factor": "commit.thresholds:FactorCommit",
        "certain": "commit.thresholds:EntropyCommit",
        "local_leap": "commit.thresholds:LocalLeapCommit",
        "explore": "commit.thresholds:ExploreCommit",
        "coherent": "commit.history:CoherentCommit",
        "coherent_adaptive": "commit.history:AdaptiveCoherentCommit",
        "agreement": "commit.history:AgreementCommit",
        "ascending": "commit.quotas:AscendingCommit",
        "time_grid": "commit.quotas:TimeGridCommit",
        "independent": "commit.quotas:IndependentCommit",
        "confident": "commit.quotas:ConfidentCommit",
        "bounded": "commit.thresholds:BoundedCommit",
        "capped": "commit.thresholds:CappedCommit",
        "learned": "commit.learned:LearnedCommit",
        "remasking": "edit:RemaskingCommit",
        "everything": "edit:AllCommit",
    },
    "edit": {
        "token_editing": "edit:TokenEdit",
        "remasking": "edit:RemaskingEdit",
        "mask_predict": "edit:MaskPredictEdit",
    },
    "check": {"grammar": "grammar_check:GrammarCheck"},
    "stop": {
        "adaptive_length": "stop:AdaptiveLengthStop",
        "end_of_text": "stop:EndOfTextStop",
        "prophet": "stop:ProphetStop",
    },
    "cache": {
        "none": "cache:NoCache",
        "prefix": "cache:BlockPrefixCache",
        "dual": "cache:DualCache",
        "window": "cache:WindowCache",
        "block": "cache:BlockCache",
    },
    "verification": {
        "none": "verification:NoVerification",
        "freedave": "verification:FreeDave",
        "freedave++": "verification:FreeDavePlus",
        "explore_tokens": "verification:ExploreTokens",
    },
}
"""Kind of part -> name -> "module:Class" within `paceline.diffusion`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A published method: which parts, with which options.

    Attributes:
        paper: title and arXiv id.
        modifiers: in order.
        options: defaults of the method where they differ from those of its parts.
        lossless: reproduces the static baseline's canvas in exact arithmetic.
        needs: of the model, in words; empty for any denoiser.
    """

    paper: str
    schedule: str = "blocks"
    score: str = "confidence"
    correction: str | None = None
    modifiers: tuple[str, ...] = ()
    commit: str = "quota"
    edit: str | None = None
    check: str | None = None
    stop: str | None = None
    cache: str = "none"
    verification: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = False
    needs: str = ""


LLADA = "Large Language Diffusion Models (arXiv:2502.09992)"
DREAM = "Dream 7B: Diffusion Large Language Models (arXiv:2508.15487)"
FAST = (
    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding "
    "(arXiv:2505.22618)"
)
CONSTRAINED = "Constrained Decoding of Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111)"
WINDOW = (
    "Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching "
    "(arXiv:2601.20332)"
)
RECAP = "Plug-and-Play Context Feature Reuse for Efficient Masked Generation (arXiv:2505.19089)"
FREEDAVE = (
    "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models "
    "(arXiv:2510.00294)"
)

LEAP = "Accelerating Diffusion LLM Inference via Local Determinism Propagation (arXiv:2510.07081)"
ROUNDS = "From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language Models (arXiv:2511.21103)"
CCD = "Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (arXiv:2512.02044)"
EOSER = (
    "Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer Decoding "
    "Step (arXiv:2509.23924)"
)
DIMPLE = "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (arXiv:2505.16990)"
TDAR = "TDAR: test-time scaling of block diffusion (arXiv:2602.09555)"
CDLM = "CD4LM: consistency distillation and confidence-adaptive decoding (https://github.com/yihao-liang/CDLM)"
PARALLEL = (
    "Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable Parallel Decoding "
    "(arXiv:2509.25188)"
)
CERTAINTY = "dParallel: Learnable Parallel Decoding for dLLMs (arXiv:2509.26488)"
PROPHET = "Diffusion Language Models Know the Answer Before Decoding (arXiv:2508.19982)"
EDITING = "LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676)"
REMDM = "Remasking Discrete Diffusion Models with Inference-Time Scaling (arXiv:2503.00307)"
MASK_PREDICT = "Mask-Predict: Parallel Decoding of Conditional Masked Language Models (arXiv:1904.09324)"

EDITS: Mapping[str, Any] = {
    "schedule": "held_blocks",
    "correction": "repetition_guard",
    "commit": "threshold",
    "edit": "token_editing",
    "needs": "training for token editing",
}

METHODS: Mapping[str, Method] = {
    "static": Method(LLADA, lossless=True),
    "random": Method(LLADA, score="random"),
    "margin": Method(DREAM, score="margin"),
    "entropy": Method(DREAM, score="entropy"),
    "leftmost": Method(LLADA, score="leftmost"),
    "threshold": Method(FAST, commit="threshold"),
    "factor": Method(FAST, commit="factor"),
    "fast_dllm_prefix": Method(FAST, commit="threshold", cache="prefix", needs="full attention"),
    "fast_dllm_dual": Method(FAST, commit="threshold", cache="dual", needs="full attention"),
    "window_diffusion": Method(WINDOW, schedule="sliding", cache="window", needs="full attention"),
    "recap": Method(RECAP, cache="dual", options={"refresh_period": 4, "recompute": "masked"}, needs="full attention"),
    "freedave": Method(FREEDAVE, verification="freedave", lossless=True),
    "freedave++": Method(
        FREEDAVE, commit="threshold", verification="freedave++", options={"confidence_threshold": 0.95}
    ),
    "cfg_dllm": Method(CONSTRAINED, check="grammar", needs="the text of tokens"),
    "local_leap": Method(LEAP, commit="local_leap"),
    "ete": Method(ROUNDS, schedule="ahead", commit="explore"),
    "ete_tokens": Method(ROUNDS, schedule="ahead", commit="explore", verification="explore_tokens"),
    "ccd": Method(CCD, score="entropy", commit="coherent"),
    "ccd_ds": Method(CCD, score="entropy", commit="coherent_adaptive"),
    "ccd_agreement": Method(CCD, score="entropy", commit="agreement"),
    "eoser": Method(EOSER, modifiers=("eoser",)),
    "ass": Method(EOSER, commit="ascending", needs="full attention"),
    "ass_blocks": Method(EOSER, schedule="ascending", commit="ascending", needs="full attention"),
    "eoser_ass": Method(
        EOSER,
        modifiers=("eoser",),
        commit="ascending",
        options={"eos_factor_min": 0.01, "eos_ramp": "exponential"},
        needs="full attention",
    ),
    "dream": Method(DREAM, score="entropy", modifiers=("order_noise",), commit="time_grid"),
    "dream_origin": Method(DREAM, score="random", commit="independent", needs="full attention"),
    "dimple": Method(DIMPLE, modifiers=("order_noise",), commit="confident"),
    "bacd": Method(TDAR, commit="bounded"),
    "bacd_progressive": Method(TDAR, schedule="progressive", commit="bounded"),
    "cad": Method(CDLM, modifiers=("eos_bar",), commit="capped"),
    "dparallel": Method(CERTAINTY, score="entropy", commit="certain"),
    "eotp": Method(PARALLEL, stop="end_of_text"),
    "learn2pd": Method(PARALLEL, commit="learned", needs="a trained filter"),
    "learn2pd_eotp": Method(PARALLEL, commit="learned", stop="end_of_text", needs="a trained filter"),
    "prophet": Method(PROPHET, stop="prophet"),
    "llada2.1_s": Method(EDITING, **EDITS, options={"confidence_threshold": 0.5, "edit_threshold": 0.0}),
    "llada2.1_q": Method(EDITING, **EDITS, options={"confidence_threshold": 0.7, "edit_threshold": 0.5}),
    "remdm": Method(REMDM, score="random", commit="remasking", edit="remasking", needs="full attention"),
    "remdm_conf": Method(
        REMDM,
        score="random",
        commit="remasking",
        edit="remasking",
        options={"remask_by": "confidence"},
        needs="full attention",
    ),
    "mask_predict": Method(MASK_PREDICT, commit="everything", edit="mask_predict", needs="full attention"),
}
