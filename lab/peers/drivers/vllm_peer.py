"""vLLM: plain decoding, its n-gram and its draft-model speculation.

Options of the open message: `method` (plain, ngram, draft_model), `num_speculative_tokens` (8 for ngram,
4 else), `prompt_lookup_max` (3), `model` (folder of the draft), `max_model_len`, `gpu_memory_utilization` (0.85).
"""

from time import perf_counter
from typing import Any


class Vllm:
    """One offline engine; prompts of one call are decoded together, nothing is kept between calls."""

    def __init__(self, request: dict[str, Any]) -> None:
        import vllm

        self.vllm, options = vllm, request["options"]
        method, speculative = options["method"], None
        guesses = int(options.get("num_speculative_tokens", 8 if method == "ngram" else 4))
        if method == "ngram":
            speculative = {"method": "ngram", "num_speculative_tokens": guesses}
            speculative["prompt_lookup_max"] = int(options.get("prompt_lookup_max", 3))
        elif method == "draft_model":
            speculative = {"method": "draft_model", "model": options["model"], "num_speculative_tokens": guesses}
        settings: dict[str, Any] = {
            "dtype": request["dtype"],
            "enable_prefix_caching": False,
            "gpu_memory_utilization": float(options.get("gpu_memory_utilization", 0.85)),
        }
        if "max_model_len" in options:
            settings["max_model_len"] = int(options["max_model_len"])
        self.engine = vllm.LLM(
            model=request["model"], skip_tokenizer_init=True, disable_log_stats=False,
            speculative_config=speculative, **settings
        )  # fmt: skip
        self.version = f"vllm {vllm.__version__}"
        self.settings = {**settings, "speculative_config": speculative}

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy. The time to the first token is the engine's own, where it keeps it."""
        rule = self.vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False)
        before, start = self._accepted(), perf_counter()
        found = self.engine.generate([{"prompt_token_ids": p} for p in prompts], rule, use_tqdm=False)
        seconds = perf_counter() - start
        answer: dict[str, Any] = {"tokens": [list(out.outputs[0].token_ids) for out in found], "seconds": seconds}
        answer["ttft"] = getattr(found[0].metrics, "first_token_latency", None)
        after = self._accepted()
        if len(prompts) == 1 and before is not None and after is not None:
            answer["passes"] = [len(answer["tokens"][0]) - (after - before)]
        return answer

    def _accepted(self) -> int | None:
        """Guesses accepted so far; None where the engine does not count them."""
        if self.settings["speculative_config"] is None:
            return 0
        read = getattr(self.engine, "get_metrics", list)
        counts = [one.value for one in read() if one.name == "vllm:spec_decode_num_accepted_tokens"]
        return int(sum(counts)) if counts else None


def open_peer(request: dict[str, Any]) -> Vllm:
    """Called by the wire loop."""
    return Vllm(request)
