"""llama.cpp through llama-cpp-python: plain decoding and its prompt lookup.

Options of the open message: `method` (plain, ngram), `num_speculative_tokens` (8),
`prompt_lookup_max` (2, longest match in tokens), `context` (2048), `gpu_layers` (0), `batch` (512, rows of a pass; 1
where products of several rows end the process, as llama.cpp's code for AMX does with blocks of 8 or 4 bits on virtual
machines without it).
"""

from pathlib import Path
from time import perf_counter
from typing import Any

from lab.peers.drivers.gguf_weights import write_gguf
from lab.peers.drivers.weights import Weights

PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}


class LlamaCpp:
    """One loaded model; the cache is emptied before every prompt."""

    def __init__(self, request: dict[str, Any]) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options = request["options"]
        precision = PRECISIONS[request["dtype"]]
        path = _converted(request["model"], Path(request["work"]), precision)
        draft, found = None, {"method": options["method"]}
        if options["method"] == "ngram":
            found |= {"num_speculative_tokens": int(options.get("num_speculative_tokens", 8))}
            found |= {"prompt_lookup_max": int(options.get("prompt_lookup_max", 2))}
            draft = LlamaPromptLookupDecoding(found["prompt_lookup_max"], found["num_speculative_tokens"])
        context, batch = int(options.get("context", 2048)), int(options.get("batch", 512))
        self.model = llama_cpp.Llama(
            model_path=str(path),
            n_ctx=context,
            n_threads=request["threads"],
            n_threads_batch=request["threads"],
            n_batch=batch,
            n_ubatch=batch,
            n_gpu_layers=int(options.get("gpu_layers", 0)),
            draft_model=draft,
            logits_all=False,
            verbose=True,  # its log goes to standard error, which is kept
        )
        self.calls, self.evaluate = 0, self.model.eval
        self.model.eval = self._eval
        self.eos = set(_listed(Weights(request["model"]).config.get("eos_token_id")))
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.settings = {
            "weights": precision,
            "kv_cache": "f16",
            "context": context,
            "batch": batch,
            "threads": request["threads"],
            **found,
        }

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy, one prompt after the other."""
        found, passes, first, start = [], [], None, perf_counter()
        for prompt in prompts:
            self.model.reset()
            self.calls, tokens = 0, list[int]()
            for token in self.model.generate(prompt, temp=0.0, repeat_penalty=1.0):
                if first is None:
                    first = perf_counter() - start
                tokens.append(int(token))
                if len(tokens) == max_tokens or (not ignore_eos and token in self.eos):
                    break
            found.append(tokens)
            passes.append(self.calls)
        return {"tokens": found, "seconds": perf_counter() - start, "ttft": first, "passes": passes}

    def _eval(self, tokens: Any) -> None:
        self.calls += 1
        self.evaluate(tokens)


def open_peer(request: dict[str, Any]) -> LlamaCpp:
    """Called by the wire loop."""
    return LlamaCpp(request)


def _converted(model: str, work: Path, precision: str) -> Path:
    path = work / f"{precision}.gguf"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        part = work / f"{precision}.part"
        write_gguf(Weights(model), part, precision)
        part.replace(path)
    return path


def _listed(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
