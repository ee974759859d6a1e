"""The literal tables of methods: where each drafter, verifier and controller lives and what is declared of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

STRICT_NOTE = (
    "Where a self-test proves that a row of a pass keeps its bits whatever is scored beside it (LLM.exactness: "
    '"strict"), "bit-equal up to near ties" becomes "bit-equal".'
)

Exactness = Literal["bit-equal", "bit-equal up to near ties", "equal in distribution", "approximate"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: where a class lives and what is declared of it.

    Attributes:
        target: "module:Class".
        kind: for drafters "table", "model", "self", "head", or "fusion", which looks at the trees of all others; for
            verifiers and controllers their role; for trainers what they make.
        exactness: class of its output at temperature 0 and above it (for drafters: under an exact verifier).
        needs: capabilities of the target's runner that it cannot do without, and other needs in words.
        paper: title and arXiv id, of which the help of a trainer says "Train as in ..."; without it, its class's first
            paragraph.
        seeded: the class above temperature 0 for requests with a seed.
        published: keys of speculative_config for a drafter that is named alone: how its paper or code uses it. "method"
            among them lists what drafts together, or one entry with a number of levels beside that of nodes.
    """

    target: str
    kind: str
    exactness: tuple[Exactness, Exactness] = ("bit-equal up to near ties", "equal in distribution")
    needs: tuple[str, ...] = ()
    paper: str = ""
    seeded: Exactness = "bit-equal up to near ties"
    published: Mapping[str, Any] = field(default_factory=lambda: {"num_speculative_tokens": 5})


LEARNED_HEADS = ("dflash2",)
"""Methods of vLLM and of papers whose heads are not read here; none may be taken for another name."""

DRAFTERS: Mapping[str, Entry] = {
    "ngram": Entry(
        "paceline.drafters.lookup.ngram:NgramDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "Prompt lookup decoding; REST (arXiv:2311.08252)",
        published={"num_speculative_tokens": 10},
    ),
    "suffix": Entry(
        "paceline.drafters.suffix.drafter:SuffixDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications (arXiv:2411.04975)",
        published={"num_speculative_tokens": 24},
    ),
    "draft_model": Entry(
        "paceline.drafters.draft_model.drafter:DraftModelDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a smaller model with the target's tokenizer",),
        "Fast inference from transformers via speculative decoding (arXiv:2211.17192)",
    ),
    "encdec_draft": Entry(
        "paceline.drafters.draft_model.encdec_draft:EncDecDraftDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("an encoder-decoder model", "decoder layers trained for the target"),
        "Distil-Whisper: robust knowledge distillation via large-scale pseudo labelling (arXiv:2311.00430)",
    ),
    "pearl": Entry(
        "paceline.drafters.draft_model.pearl:PearlDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a smaller model with the target's tokenizer",),
        "PEARL: parallel speculative decoding with adaptive draft length (arXiv:2408.11850)",
    ),
    "quantized_copy": Entry(
        "paceline.drafters.self.quantized_copy:QuantizedCopyDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("memory for an int8 or int4 copy of the target",),
        "Speculative decoding meets quantization (arXiv:2505.22179); QSpec (arXiv:2410.11305)",
        published={"num_speculative_tokens": 3},
    ),
    "specmquant": Entry(
        "paceline.drafters.draft_model.specmquant:SpecMQuantDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("memory for an int4 or int8 copy of the target, or a model between target and draft",),
        "Speculative decoding meets quantization (arXiv:2505.22179)",
        published={"num_speculative_tokens": 6},
    ),
    "s2d": Entry(
        "paceline.drafters.draft_model.s2d:S2dDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a smaller model of two layers or more with the target's tokenizer",),
        "S2D: sorted speculative decoding for nested large language models (arXiv:2407.01955)",
    ),
    "easyspec": Entry(
        "paceline.drafters.draft_model.easyspec:EasySpecDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a smaller model of four layers or more with the target's tokenizer",),
        "EasySpec: layer-parallel speculative decoding for efficient multi-GPU utilization (arXiv:2502.02493)",
    ),
    "pard": Entry(
        "paceline.drafters.draft_model.pard:PardDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a parallel draft model with the target's tokenizer",),
        "PARD: accelerating LLM inference with low-cost parallel draft model adaptation (arXiv:2504.18583)",
        published={"num_speculative_tokens": 12},
    ),
    "diffuspec": Entry(
        "paceline.drafters.diffusion.diffuspec:DiffuSpecDrafter",
        "model",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a diffusion language model with the target's tokenizer",),
        "DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding (arXiv:2510.02358)",
        published={"controller": "diffuspec"},
    ),
    "deer": Entry(
        "paceline.drafters.diffusion.deer:DeerDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a diffusion language model with the target's tokenizer",),
        "DEER: Draft with Diffusion, Verify with Autoregressive Models (arXiv:2512.15176)",
        published={"num_speculative_tokens": 32},
    ),
    "tli": Entry(
        "paceline.drafters.vocab.tli:TliDrafter",
        "model",
        ("bit-equal up to near ties", "equal in distribution"),
        ("a smaller model with another tokenizer",),
        "Lossless speculative decoding for heterogeneous vocabularies: token-level intersection (arXiv:2502.05202)",
    ),
    "slem": Entry(
        "paceline.drafters.vocab.slem:SlemDrafter",
        "model",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a smaller model with another tokenizer",),
        "Lossless speculative decoding for heterogeneous vocabularies: string-level exact match (arXiv:2502.05202)",
    ),
    "layer_skip": Entry(
        "paceline.drafters.self.layer_skip:LayerSkipDrafter",
        "self",
        ("bit-equal up to near ties", "equal in distribution"),
        ("early_exit", "head"),
        "LayerSkip: enabling early exit inference and self-speculative decoding (arXiv:2404.16710)",
        published={"num_speculative_tokens": 6},
    ),
    "swift": Entry(
        "paceline.drafters.self.swift:SwiftDrafter",
        "self",
        ("bit-equal up to near ties", "equal in distribution"),
        ("early_exit", "layer_subsets", "head", "fork", "truncate"),
        "SWIFT: on-the-fly self-speculative decoding for LLM inference acceleration (arXiv:2410.06916)",
        published={"controller": "swift", "tree_width": 10},
    ),
    "del": Entry(
        "paceline.drafters.self.dynamic_exit:DynamicExitDrafter",
        "self",
        ("bit-equal up to near ties", "equal in distribution"),
        ("early_exit", "head", "taps"),
        "DEL: Context-aware dynamic exit layer for efficient self-speculative decoding (arXiv:2504.05598)",
        published={"num_speculative_tokens": 18, "shadow_every": 1},
    ),
    "kangaroo": Entry(
        "paceline.drafters.self.kangaroo:KangarooDrafter",
        "self",
        ("bit-equal up to near ties", "equal in distribution"),
        ("early_exit", "head", "fork", "an adapter trained for the target"),
        "Kangaroo: lossless self-speculative decoding via double early exiting (arXiv:2404.18911)",
        published={"controller": "kangaroo", "resume_verification": True},
    ),
    "m2r2": Entry(
        "paceline.drafters.self.m2r2:M2R2Drafter",
        "self",
        ("bit-equal up to near ties", "equal in distribution"),
        ("early_exit", "head", "adapters trained for the target"),
        "M2R2: mixture of multi-rate residuals for efficient transformer inference (arXiv:2502.02040)",
    ),
    "medusa": Entry(
        "paceline.drafters.heads.medusa:MedusaDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 4},
    ),
    "hydra": Entry(
        "paceline.drafters.heads.hydra:HydraDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 4},
    ),
    "hydra++": Entry(
        "paceline.drafters.heads.hydra:HydraPlusDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 4},
    ),
    "clover": Entry(
        "paceline.drafters.heads.clover:CloverDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Clover: regressive lightweight speculative decoding with sequential knowledge (arXiv:2405.00263)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 4},
    ),
    "chimera": Entry(
        "paceline.drafters.heads.chimera:ChimeraDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Chimera: a lossless decoding method for accelerating large language models inference by fusing all tokens "
        "(arXiv:2402.15758)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 4},
    ),
    "mlp_speculator": Entry(
        "paceline.drafters.heads.mlp_speculator:MLPSpeculatorDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "heads trained for the target"),
        "Accelerating production LLMs with combined token/embedding speculators (arXiv:2404.19124)",
        published={"num_speculative_tokens": 3},
    ),
    "eagle": Entry(
        "paceline.drafters.heads.eagle:EagleDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a head trained for the target"),
        "EAGLE: speculative sampling requires rethinking feature uncertainty (arXiv:2401.15077)",
    ),
    "eagle2": Entry(
        "paceline.drafters.heads.eagle:Eagle2Drafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "trees", "a head trained for the target"),
        "EAGLE-2: faster inference of language models with dynamic draft trees (arXiv:2406.16858)",
        published={"method": [{"method": "eagle2", "num_speculative_tokens": 6}], "num_speculative_tokens": 59},
    ),
    "fspad": Entry(
        "paceline.drafters.heads.fspad:FspadDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "trees", "a head trained for the target"),
        "Boosting lossless speculative decoding via feature sampling and partial alignment distillation "
        "(arXiv:2408.15562)",
        published={"method": [{"method": "fspad", "num_speculative_tokens": 6}], "num_speculative_tokens": 59},
    ),
    "eagle3": Entry(
        "paceline.drafters.heads.eagle:Eagle3Drafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a head trained for the target"),
        "EAGLE-3: scaling up inference acceleration of large language models via training-time test (arXiv:2503.01840)",
    ),
    "dovetail": Entry(
        "paceline.drafters.heads.dovetail:DovetailDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "trees", "a head trained for the target"),
        "Dovetail: a CPU/GPU heterogeneous speculative decoding for LLM inference (arXiv:2412.18934)",
        published={"method": [{"method": "dovetail", "num_speculative_tokens": 6}], "num_speculative_tokens": 16},
    ),
    "p_eagle": Entry(
        "paceline.drafters.heads.p_eagle:PEagleDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a head trained for the target"),
        "P-EAGLE: parallel-drafting EAGLE with scalable training (arXiv:2602.01469)",
        published={"num_speculative_tokens": 7},
    ),
    "falcon": Entry(
        "paceline.drafters.heads.falcon:FalconDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a head trained for the target"),
        "Falcon: faster and parallel inference of large language models through enhanced semi-autoregressive drafting "
        "and custom-designed decoding tree (arXiv:2412.12639)",
        published={"controller": "ppd", "max_nodes": 117, "max_depth": 8},
    ),
    "longspec": Entry(
        "paceline.drafters.heads.longspec:LongSpecDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("last_keys", "a head trained for the target"),
        "LongSpec: long-context lossless speculative decoding with efficient drafting and verification "
        "(arXiv:2502.17421)",
    ),
    "mtp": Entry(
        "paceline.drafters.heads.mtp:MtpDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a model with a module for multi-token prediction, or one trained for it"),
        "FastMTP: accelerating LLM inference with enhanced multi-token prediction (arXiv:2509.18362)",
        published={"num_speculative_tokens": 3},
    ),
    "dflash": Entry(
        "paceline.drafters.heads.dflash:DFlashDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a network trained for the target"),
        "DFlash: block diffusion for flash speculative decoding (arXiv:2602.06036)",
        published={"num_speculative_tokens": 15},
    ),
    "dspark": Entry(
        "paceline.drafters.heads.dflash:DSparkDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("taps", "a network trained for the target"),
        "DSpark (arXiv:2607.05147)",
        published={"num_speculative_tokens": 7},
    ),
    "ppd": Entry(
        "paceline.drafters.heads.ppd:PPDDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("added_rows", "prompt tokens trained for the target"),
        "Hardware-Aware Parallel Prompt Decoding for memory-efficient acceleration of LLM inference (arXiv:2405.18628)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 3},
    ),
    "lud": Entry(
        "paceline.drafters.heads.lud:LudDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("added_rows", "a model fine-tuned for it"),
        "Decoding at the speed of thought: harnessing parallel decoding of lexical units for LLMs (arXiv:2405.15208)",
        published={"num_speculative_tokens": 3},
    ),
    "hidden_transfer": Entry(
        "paceline.drafters.heads.hidden_transfer:HiddenTransferDrafter",
        "head",
        ("bit-equal up to near ties", "equal in distribution"),
        ("added_rows", "early_exit", "truncate", "maps trained for the target"),
        "Parallel decoding via hidden transfer for lossless large language model acceleration (arXiv:2404.12022)",
        published={"controller": "ppd", "max_nodes": 63, "max_depth": 3},
    ),
    "lookahead": Entry(
        "paceline.drafters.lookup.lookahead:LookaheadDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("trees",),
        "Break the sequential dependency of LLM inference using lookahead decoding (arXiv:2402.02057)",
        published={
            "max_window_size": 15,
            "max_ngram_size": 5,
            "max_verification_set_size": 15,
            "num_speculative_tokens": 120,
        },
    ),
    "jacobi": Entry(
        "paceline.drafters.lookup.jacobi:JacobiDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "Accelerating transformer inference for translation via parallel decoding (arXiv:2305.10427)",
    ),
    "copyspec": Entry(
        "paceline.drafters.lookup.copyspec:CopySpecDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "CopySpec: accelerating LLMs with speculative copy-and-paste (arXiv:2502.08923)",
        published={"num_speculative_tokens": 10},
    ),
    "token_recycling": Entry(
        "paceline.drafters.lookup.token_recycling:TokenRecyclingDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "Turning trash into treasure: Token Recycling (arXiv:2408.08696)",
        published={"num_speculative_tokens": 80},
    ),
    "grammar": Entry(
        "paceline.drafters.lookup.grammar:GrammarDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a constraint (structured outputs) with the request",),
        "Forced tokens of constrained decoding (fast-forward tokens of llguidance)",
        published={"num_speculative_tokens": 16},
    ),
    "prediction": Entry(
        "paceline.drafters.lookup.prediction:PredictionDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a prediction with the request",),
        "Predicted outputs of the OpenAI API; aggressive decoding (arXiv:2205.10350)",
        published={"num_speculative_tokens": 32},
    ),
    "rest": Entry(
        "paceline.drafters.retrieval.rest:RestDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a datastore made with the target's tokenizer",),
        "REST: retrieval-based speculative decoding (arXiv:2311.08252)",
        published={"num_speculative_tokens": 64},
    ),
    "rasd": Entry(
        "paceline.drafters.retrieval.rasd:RasdDrafter",
        "fusion",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        ("a datastore made with the target's tokenizer",),
        "RASD: retrieval-augmented speculative decoding (arXiv:2503.03434)",
        published={
            "method": [{"method": "draft_model", "tree_policy": "eagle2"}, {"method": "rasd"}],
            "num_speculative_tokens": 64,
        },
    ),
    "aded": Entry(
        "paceline.drafters.lookup.aded:AdedDrafter",
        "table",
        ("bit-equal up to near ties", "bit-equal up to near ties"),
        (),
        "Adaptive draft-verification for efficient LLM decoding (arXiv:2407.12021)",
        published={"num_speculative_tokens": 16},
    ),
}

VERIFIERS: Mapping[str, Entry] = {
    "greedy": Entry(
        "paceline.verifiers.greedy:GreedyVerifier", "verifier", paper="equal or reject; SpecInfer (arXiv:2305.09781)"
    ),
    "rejection_sampler": Entry(
        "paceline.verifiers.recursive_rejection:RecursiveRejection",
        "verifier",
        paper="Speculative sampling (arXiv:2302.01318); recursive rejection (arXiv:2402.14160)",
    ),
    "block_verification": Entry(
        "paceline.verifiers.block:BlockVerification",
        "verifier",
        needs=("chains: drawn drafts that branch are rejected",),
        paper="Block verification accelerates speculative decoding (arXiv:2403.10444)",
    ),
    "k_seq": Entry(
        "paceline.verifiers.k_seq:KSeq",
        "verifier",
        paper="SpecTr: fast speculative decoding via optimal transport (arXiv:2310.15141)",
    ),
    "greedy_draft_sampling": Entry(
        "paceline.verifiers.greedy_draft:GreedyDraftSampling",
        "verifier",
        paper="Towards optimal multi-draft speculative decoding (arXiv:2502.18779)",
    ),
    "typical_acceptance_sampler": Entry(
        "paceline.verifiers.typical:TypicalAcceptance",
        "verifier",
        ("bit-equal up to near ties", "approximate"),
        paper="Medusa (arXiv:2401.10774)",
    ),
    "fly": Entry(
        "paceline.verifiers.fly:Fly",
        "verifier",
        ("approximate", "approximate"),
        ("chains: methods and settings that draft trees are rejected",),
        "Training-free loosely speculative decoding (arXiv:2511.22972)",
    ),
    "relaxed_thinking": Entry(
        "paceline.verifiers.relaxed_thinking:RelaxedThinking",
        "verifier",
        ("approximate", "equal in distribution"),
        ("chains: methods and settings that draft trees are rejected",),
        "DeepSeek R1 MTP implementation and optimization (technical blog of TensorRT-LLM)",
    ),
    "reflective": Entry(
        "paceline.verifiers.reflective:Reflective",
        "verifier",
        ("approximate", "approximate"),
        ("chains: methods and settings that draft trees are rejected",),
        "Think Before You Accept: semantic reflective verification (arXiv:2505.18629)",
    ),
    "lexical_units": Entry(
        "paceline.verifiers.lexical_units:LexicalUnits",
        "verifier",
        ("approximate", "approximate"),
        ("chains: methods and settings that draft trees are rejected", "method lud"),
        "Decoding at the speed of thought: parallel decoding of lexical units (arXiv:2405.15208)",
    ),
    "judge": Entry(
        "paceline.verifiers.judge:Judge",
        "verifier",
        ("approximate", "approximate"),
        ("chains: methods and settings that draft trees are rejected", "taps", "a head trained for the target"),
        "Judge decoding: faster speculative sampling requires going beyond model alignment (arXiv:2501.19309)",
    ),
    "accept_thresholds": Entry(
        "paceline.verifiers.accept_thresholds:AcceptThresholds",
        "verifier",
        ("bit-equal up to near ties", "approximate"),
        paper="Tree verification by target probabilities alone (SGLang)",
    ),
}

CONTROLLERS: Mapping[str, Entry] = {
    "auto": Entry(
        "paceline.controllers.auto:AutoController", "controller", paper="expected accepted tokens per second"
    ),
    "fixed": Entry(
        "paceline.controllers.policies.fixed:FixedController", "controller", paper="a fixed number of tokens"
    ),
    "heuristic": Entry(
        "paceline.controllers.policies.heuristic:HeuristicController",
        "controller",
        paper="assisted generation of transformers (heuristic)",
    ),
    "specdec_pp": Entry(
        "paceline.controllers.policies.specdec_pp:SpecDecPPController",
        "controller",
        needs=("a draft model with an acceptance head",),
        paper="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715)",
    ),
    "online_acceptance": Entry(
        "paceline.controllers.policies.online_acceptance:OnlineAcceptanceController",
        "controller",
        paper="the rule of SpecDec++ (arXiv:2405.19715) with a predictor that learns while decoding",
    ),
    "kangaroo": Entry(
        "paceline.controllers.policies.kangaroo:KangarooController", "controller", paper="Kangaroo (arXiv:2404.18911)"
    ),
    "swift": Entry(
        "paceline.controllers.policies.swift:SwiftController", "controller", paper="SWIFT (arXiv:2410.06916)"
    ),
    "diffuspec": Entry(
        "paceline.controllers.policies.diffuspec:DiffuSpecController",
        "controller",
        paper="DiffuSpec (arXiv:2510.02358)",
    ),
    "ppd": Entry(
        "paceline.controllers.policies.ppd:PPDController", "controller", paper="Hardware-aware PPD (arXiv:2405.18628)"
    ),
}

ROUTING = "routing"
"""Kind of searches that let a second model write a part of the text, which strict mode rejects."""

SEARCHES: Mapping[str, Entry] = {
    "beam": Entry(
        "paceline.search.methods.beam:BeamSearch", "beam", paper="as `generate(num_beams=...)` of transformers"
    ),
    "diverse_beam": Entry(
        "paceline.search.methods.beam:DiverseBeamSearch",
        "beam",
        paper="Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models (arXiv:1610.02424)",
    ),
    "self_consistency": Entry(
        "paceline.search.methods.voting:SelfConsistency",
        "selection",
        paper="Self-Consistency Improves Chain of Thought Reasoning in Language Models (arXiv:2203.11171)",
    ),
    "complexity_voting": Entry(
        "paceline.search.methods.voting:ComplexityVoting",
        "selection",
        paper="Complexity-Based Prompting for Multi-Step Reasoning (arXiv:2210.00720)",
    ),
    "sample_and_rank": Entry(
        "paceline.search.methods.sample_and_rank:SampleAndRank",
        "selection",
        paper="Towards a Human-like Open-Domain Chatbot (arXiv:2001.09977); Uni-Encoder (arXiv:2106.01263)",
    ),
    "first_finish": Entry(
        "paceline.search.methods.first_finish:FirstFinish",
        "selection",
        paper="First Finish Search: Efficient Test-Time Scaling in Large Language Models (arXiv:2505.18149)",
    ),
    "cautious": Entry(
        "paceline.search.methods.cautious:CautiousPrediction",
        "lookahead",
        paper="Cautious Next Token Prediction (arXiv:2507.03038)",
    ),
    "adadec": Entry(
        "paceline.search.methods.adadec:AdaDec",
        "lookahead",
        paper="Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance (arXiv:2506.08980)",
    ),
    "transfer_q": Entry(
        "paceline.search.methods.transfer_q:TransferQ",
        "lookahead",
        ("approximate", "approximate"),
        ("a reward",),
        "Transfer Q*: Principled Decoding for LLM Alignment (arXiv:2405.20495)",
    ),
    "superposed": Entry(
        "paceline.search.methods.superposed:Superposed",
        "beam",
        ("approximate", "approximate"),
        ("head", "input_embeddings"),
        paper="Superposed Decoding: Multiple Generations from a Single Inference Pass (arXiv:2405.18400)",
    ),
    "a_star": Entry(
        "paceline.search.methods.a_star:AStar",
        "tree search",
        ("approximate", "approximate"),
        ("a reward",),
        "A*-Decoding: Token-Efficient Inference Scaling (arXiv:2505.13672)",
    ),
    "pg_td": Entry(
        "paceline.search.methods.pg_td:PgTd",
        "tree search",
        ("approximate", "approximate"),
        ("a reward, or tests and a machine that permits a sandbox",),
        "Planning with Large Language Models for Code Generation (arXiv:2303.05510)",
    ),
    "ved": Entry(
        "paceline.search.methods.ved:Ved",
        "tree search",
        ("approximate", "approximate"),
        ("a value of partial texts",),
        "Spend Search Where It Pays: Value-Guided Structured Sampling and Optimization for Generative Recommendation "
        "(arXiv:2602.10699)",
    ),
    "gfd": Entry(
        "paceline.search.methods.fusion:GenerativeFusion",
        "beam",
        ("approximate", "approximate"),
        ("a second model or a scorer",),
        "Let's Fuse Step by Step: Generative Fusion Decoding (arXiv:2405.14259)",
    ),
    "ead": Entry(
        "paceline.search.methods.ead:EntropyAdaptive",
        ROUTING,
        ("approximate", "approximate"),
        ("a smaller model with the target's tokenizer",),
        "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference (arXiv:2502.06833)",
    ),
    "arbitrage": Entry(
        "paceline.search.methods.arbitrage:Arbitrage",
        ROUTING,
        ("approximate", "approximate"),
        ("a smaller model with the target's tokenizer, and a router trained for it",),
        "Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (arXiv:2512.05033)",
    ),
    "ralm": Entry(
        "paceline.search.methods.ralm:Ralm",
        "retrieval",
        needs=("an index of passages",),
        paper="Accelerating Retrieval-Augmented Language Model Serving with Speculation (arXiv:2401.14021)",
    ),
    "knn_lm": Entry(
        "paceline.search.methods.knn_lm:KnnLm",
        "retrieval",
        needs=("taps", "a store of tokens"),
        paper="Generalization through Memorization: Nearest Neighbor Language Models (arXiv:1911.00172); RaLMSpec "
        "(arXiv:2401.14021)",
    ),
    "backoff": Entry(
        "paceline.search.methods.backoff:BackOff",
        "constraint",
        paper="vulnerability-constrained decoding of smart contracts (arXiv:2309.09826)",
    ),
}

STEERINGS: Mapping[str, Entry] = {
    "dola": Entry(
        "paceline.sampling.steering.dola:DoLa",
        "layers",
        needs=("taps", "head"),
        paper="DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models (arXiv:2309.03883)",
    ),
    "cfg": Entry(
        "paceline.sampling.steering.guidance:ClassifierFreeGuidance",
        "prompt",
        paper="Stay on topic with Classifier-Free Guidance (arXiv:2306.17806)",
    ),
    "contrastive": Entry(
        "paceline.sampling.steering.contrastive:ContrastiveDecoding",
        "model",
        needs=("an amateur model",),
        paper="Contrastive Decoding: Open-ended Text Generation as Optimization (arXiv:2210.15097)",
    ),
    "lol": Entry(
        "paceline.sampling.steering.lol:LowerLayerMatters",
        "model",
        needs=("taps", "head", "an amateur model, or an adapter that makes it"),
        paper="Lower Layer Matters: Alleviating Hallucination via Multi-Layer Fusion Contrastive Decoding with "
        "Truthfulness Refocused (arXiv:2408.08769)",
    ),
    "svdecode": Entry(
        "paceline.sampling.steering.svdecode:SVDecode",
        "model",
        needs=("the model's base",),
        paper="Distribution-Aligned Decoding for Efficient LLM Task Adaptation (arXiv:2509.15888)",
    ),
}

KV_SELECTIONS: Mapping[str, Entry] = {
    "double_sparsity": Entry(
        "paceline.models.attention.double_sparsity:DoubleSparsity",
        "channels",
        ("approximate", "approximate"),
        ("channels that `paceline analyze channels` has found for the model",),
        "Post-Training Sparse Attention with Double Sparsity (arXiv:2408.07092)",
    ),
    "loopserve": Entry(
        "paceline.models.attention.loopserve:LoopServe",
        "queries",
        ("approximate", "approximate"),
        (),
        "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues "
        "(arXiv:2507.13681)",
    ),
}

SKIPPINGS: Mapping[str, Entry] = {
    "unified_layer_skipping": Entry(
        "paceline.models.runners.layer_skipping:UnifiedLayerSkipping",
        "layers",
        ("approximate", "approximate"),
        ("an adapter of `paceline train unified_layer_skipping`, for readable text",),
        "Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (arXiv:2404.06954)",
    ),
    "lora_drop": Entry(
        "paceline.models.runners.lora_drop:LoraDrop",
        "layers",
        ("approximate", "approximate"),
        ("corrections of `paceline train lora_drop`, for readable text",),
        "LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference (arXiv:2601.02569)",
    ),
    "hcot": Entry(
        "paceline.models.runners.hidden_thoughts:HiddenThoughts",
        "thoughts",
        ("approximate", "approximate"),
        ("two adapters of `paceline train hcot_thinker` and `paceline train hcot`",),
        "Expediting and Elevating Large Language Model Reasoning via Hidden Chain-of-Thought Decoding "
        "(arXiv:2409.08561)",
    ),
}

TRAINERS: Mapping[str, Entry] = {
    "eagle3": Entry("paceline.training.eagle3:Eagle3Trainer", "head", paper="EAGLE-3 (arXiv:2503.01840)"),
    "eagle": Entry("paceline.training.eagle:EagleTrainer", "head", paper="EAGLE (arXiv:2401.15077)"),
    "fspad": Entry("paceline.training.fspad:FspadTrainer", "head", paper="FSPAD (arXiv:2408.15562)"),
    "mtp": Entry("paceline.training.mtp:MtpTrainer", "head", paper="FastMTP (arXiv:2509.18362)"),
    "dflash": Entry("paceline.training.dflash:DFlashTrainer", "head", paper="DFlash (arXiv:2602.06036)"),
    "dspark": Entry("paceline.training.dspark:DSparkTrainer", "head", paper="DSpark (arXiv:2607.05147)"),
    "hydra++": Entry("paceline.training.hydra:HydraPlusTrainer", "head", paper="Hydra++ (arXiv:2402.05109)"),
    "hydra": Entry("paceline.training.hydra:HydraTrainer", "head", paper="Hydra (arXiv:2402.05109)"),
    "clover": Entry("paceline.training.clover:CloverTrainer", "head", paper="Clover (arXiv:2405.00263)"),
    "chimera": Entry("paceline.training.chimera:ChimeraTrainer", "head", paper="Chimera (arXiv:2402.15758)"),
    "ppd": Entry("paceline.training.ppd:PPDTrainer", "prompt tokens", paper="PPD (arXiv:2405.18628)"),
    "hidden_transfer": Entry(
        "paceline.training.hidden_transfer:HiddenTransferTrainer", "head", paper="Hidden transfer (arXiv:2404.12022)"
    ),
    "lud": Entry("paceline.training.lud:LudTrainer", "head and model", paper="LUD (arXiv:2405.15208)"),
    "medusa": Entry("paceline.training.medusa:MedusaTrainer", "head", paper="Medusa-1 (arXiv:2401.10774)"),
    "medusa2": Entry("paceline.training.medusa2:Medusa2Trainer", "head and model", paper="Medusa-2 (arXiv:2401.10774)"),
    "mlp_speculator": Entry(
        "paceline.training.mlp_speculator:MLPSpeculatorTrainer", "head", paper="MLP speculators (arXiv:2404.19124)"
    ),
    "draft_model": Entry(
        "paceline.training.draft_model:DraftModelTrainer", "draft model", paper="FastDraft (arXiv:2411.11055)"
    ),
    "dovetail": Entry("paceline.training.dovetail:DovetailTrainer", "head", paper="Dovetail (arXiv:2412.18934)"),
    "p_eagle": Entry("paceline.training.p_eagle:PEagleTrainer", "head", paper="P-EAGLE (arXiv:2602.01469)"),
    "falcon": Entry("paceline.training.falcon:FalconTrainer", "head", paper="Falcon (arXiv:2412.12639)"),
    "longspec": Entry("paceline.training.longspec:LongSpecTrainer", "head", paper="LongSpec (arXiv:2502.17421)"),
    "pard": Entry("paceline.training.pard:PardTrainer", "draft model", paper="PARD (arXiv:2504.18583)"),
    "s2d": Entry(
        "paceline.training.s2d:S2dTrainer", "draft model", paper="S2D: Sorted Speculative Decoding (arXiv:2407.01955)"
    ),
    "encdec_draft": Entry(
        "paceline.training.encdec_draft:EncDecDraftTrainer", "draft model", paper="Distil-Whisper (arXiv:2311.00430)"
    ),
    "specdec_pp": Entry(
        "paceline.training.specdec_pp:SpecDecPPTrainer", "acceptance head", paper="SpecDec++ (arXiv:2405.19715)"
    ),
    "kangaroo": Entry("paceline.training.kangaroo:KangarooTrainer", "head", paper="Kangaroo (arXiv:2404.18911)"),
    "m2r2": Entry("paceline.training.m2r2:M2R2Trainer", "adapters", paper="M2R2 (arXiv:2502.02040)"),
    "layer_skip": Entry("paceline.training.layer_skip:LayerSkipTrainer", "model", paper="LayerSkip (arXiv:2404.16710)"),
    "hybrid": Entry("paceline.training.hybrid:HybridTrainer", "model", paper="MOHAWK (arXiv:2408.10189)"),
    "judge": Entry("paceline.training.judge:JudgeTrainer", "judge", paper="Judge Decoding (arXiv:2501.19309)"),
    "lora": Entry("paceline.training.lora:LoraTrainer", "adapter", paper="LoRA (arXiv:2106.09685)"),
    "unified_layer_skipping": Entry(
        "paceline.training.layer_skipping:LayerSkippingTrainer",
        "adapter",
        paper="Unified Layer Skipping (arXiv:2404.06954)",
    ),
    "lora_drop": Entry(
        "paceline.training.layer_skipping:LoraDropTrainer", "corrections", paper="LoRA-Drop (arXiv:2601.02569)"
    ),
    "hcot_thinker": Entry(
        "paceline.training.hidden_thoughts:ThinkerTrainer", "adapter", paper="HCoT (arXiv:2409.08561)"
    ),
    "hcot": Entry("paceline.training.hidden_thoughts:ThoughtTrainer", "adapter", paper="HCoT (arXiv:2409.08561)"),
    "codebooks": Entry(
        "paceline.training.codebooks:CodebookTrainer", "model", paper="Codebook Features (arXiv:2310.17230)"
    ),
}
"""What `paceline train` makes; they decode nothing, and so they are no family of FAMILIES."""

FAMILIES: Mapping[str, Mapping[str, Entry]] = {
    "drafters": DRAFTERS,
    "verifiers": VERIFIERS,
    "controllers": CONTROLLERS,
    "searches": SEARCHES,
    "steerings": STEERINGS,
    "kv_selections": KV_SELECTIONS,
    "skippings": SKIPPINGS,
}
"""Methods of decoding."""
