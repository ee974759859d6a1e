"""transformers: plain decoding, assisted generation with a draft model, prompt lookup.

Options of the open message: `method` (plain, draft_model, ngram), `num_speculative_tokens` (8 for ngram;
absent, the library's own schedule for a draft), `prompt_lookup_max` (3), `model` (folder of the draft), `device` (cpu).
"""

from time import perf_counter
from typing import Any


class Transformers:
    """One model in eager mode; plain prompts of one call are decoded together, left-padded."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch
        import transformers

        self.torch, options = torch, request["options"]
        torch.set_num_threads(request["threads"])
        self.device, self.method = options.get("device", "cpu"), options["method"]
        dtype = getattr(torch, request["dtype"])

        def load(folder: str) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(self.device).eval()

        self.model = load(request["model"])
        self.extra: dict[str, Any] = {}
        found = {"method": self.method, "dtype": request["dtype"], "threads": request["threads"], "device": self.device}
        guesses = options.get("num_speculative_tokens", 8 if self.method == "ngram" else None)
        if self.method == "ngram":
            self.extra = {
                "prompt_lookup_num_tokens": int(guesses),
                "max_matching_ngram_size": int(options.get("prompt_lookup_max", 3)),
            }
        if self.method == "draft_model":
            draft = load(options["model"])
            if guesses is not None:
                draft.generation_config.num_assistant_tokens = int(guesses)
                draft.generation_config.num_assistant_tokens_schedule = "constant"
                draft.generation_config.assistant_confidence_threshold = 0.0
            self.extra = {"assistant_model": draft}
        if guesses is not None:
            found["num_speculative_tokens"] = int(guesses)
        self.eos, self.calls = self.model.generation_config.eos_token_id, 0
        self.model.register_forward_pre_hook(self._count)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.settings = found

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy. The time to the first token is taken where the library streams it (one prompt)."""
        if len(prompts) > 1 and self.method != "plain":
            raise ValueError(f"method {self.method} takes one prompt at a time, got {len(prompts)}")
        torch, longest = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        clock = FirstToken() if len(prompts) == 1 else None
        extra = {**self.extra, **({"streamer": clock} if clock and self.method == "plain" else {})}
        eos = None if ignore_eos else self.eos
        self.model.generation_config.eos_token_id = eos
        self.calls, start = 0, perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **extra
            )  # fmt: skip
        seconds = perf_counter() - start
        rows = [_cut(row, eos) for row in out[:, longest:].tolist()]
        ttft = clock.at - start if clock is not None and clock.at is not None else None
        passes = [self.calls] if len(rows) == 1 else [len(row) for row in rows]  # a batch is decoded plainly
        return {"tokens": rows, "seconds": seconds, "ttft": ttft, "passes": passes}

    def _count(self, *_: Any) -> None:
        self.calls += 1


class FirstToken:
    """A streamer that notes when the first new token comes (its first call is the prompt)."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: float | None = None

    def put(self, _value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def _cut(row: list[int], eos: Any) -> list[int]:
    """Up to and with the first end token; what follows is padding."""
    ends = set() if eos is None else set(eos) if isinstance(eos, list) else {eos}
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row


def open_peer(request: dict[str, Any]) -> Transformers:
    """Called by the wire loop."""
    return Transformers(request)
