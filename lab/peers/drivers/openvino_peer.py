"""OpenVINO GenAI: plain decoding, a draft model, prompt lookup.

Options of the open message: `method` (plain, draft_model, ngram), `num_speculative_tokens` (8 for ngram,
4 else), `prompt_lookup_max` (3), `model` (folder of the draft), `backend` (PA, the paged attention, or SDPA),
`kv_cache` (a type name), `compute` (precision of the arithmetic; int8 weights compute in bfloat16), `cache_gb` (1).
"""

import json
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

from lab.peers.drivers.llama_weights import LlamaWeights
from lab.peers.drivers.openvino_graph import write_openvino

HINTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class OpenVino:
    """One pipeline; prompts of one call are decoded together."""

    def __init__(self, request: dict[str, Any]) -> None:
        import openvino_genai as genai

        self.genai, options, store = genai, request["options"], request["dtype"]
        self.method = options["method"]
        self.guesses = int(options.get("num_speculative_tokens", 8 if self.method == "ngram" else 4))
        self.ngram = int(options.get("prompt_lookup_max", 3))
        folder = _converted(request["model"], Path(request["work"]), store)
        hint = HINTS[options.get("compute", "bfloat16" if store == "int8" else store)]
        properties = {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": options.get("kv_cache", hint),
            "INFERENCE_NUM_THREADS": request["threads"],
        }
        backend = options.get("backend", "PA")
        extra = self._extra(request, store, properties, backend)
        self.pipe = genai.LLMPipeline(str(folder), "CPU", ATTENTION_BACKEND=backend, **properties, **extra)
        self.eos = LlamaWeights(request["model"]).config.get("eos_token_id")
        self.version = f"openvino-genai {genai.__version__}"
        self.settings = {"weights": store, "backend": backend, **properties, "method": self.method}
        if self.method != "plain":
            self.settings["num_speculative_tokens"] = self.guesses

    def _extra(self, request: dict[str, Any], store: str, properties: dict[str, Any], backend: str) -> dict[str, Any]:
        """Arguments of the pipeline for the method and the cache."""
        extra: dict[str, Any] = {}
        if self.method == "ngram":
            extra["prompt_lookup"] = True
        if self.method == "draft_model":
            draft = _converted(request["options"]["model"], Path(request["draft_work"]), store)
            extra["draft_model"] = self.genai.draft_model(str(draft), "CPU", **properties)
        if backend == "PA":
            scheduler = self.genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.cache_size = int(request["options"].get("cache_gb", 1))
            extra["scheduler_config"] = scheduler
        return extra

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy; one call of the pipeline."""
        import numpy as np
        import openvino as ov

        config = self.genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        if isinstance(self.eos, int) and not ignore_eos:
            config.eos_token_id = self.eos
        config.do_sample = False
        if self.method != "plain":
            config.num_assistant_tokens = self.guesses
        if self.method == "ngram":
            config.max_ngram_size = self.ngram
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        start = perf_counter()
        found = self.pipe.generate(self.genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask)), config)
        seconds = perf_counter() - start
        tokens = [list(map(int, row)) for row in found.tokens]
        answer = {"tokens": tokens, "seconds": seconds, "ttft": found.perf_metrics.get_ttft().mean / 1000}
        if len(prompts) == 1:
            answer["passes"] = [len(found.perf_metrics.raw_metrics.token_infer_durations)]
        elif self.method == "plain":
            answer["passes"] = [len(row) for row in tokens]
        return answer


def open_peer(request: dict[str, Any]) -> OpenVino:
    """Called by the wire loop."""
    return OpenVino(request)


def _converted(model: str, work: Path, store: str) -> Path:
    folder = work / f"openvino-{store}"
    if not folder.exists():
        part = work / f"openvino-{store}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        weights = LlamaWeights(model)
        write_openvino(weights, part, store)
        config = {**weights.config}
        if config.get("eos_token_id") is None:
            config["eos_token_id"] = weights.shape.vocab  # the pipeline asks for one; this one never comes up
        for name in ("config.json", "generation_config.json"):
            (part / name).write_text(json.dumps(config), encoding="utf-8")
        part.replace(folder)
    return folder
