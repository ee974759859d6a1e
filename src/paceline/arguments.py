"""What vLLM, transformers and chat templates take beside our own arguments of `LLM`, and what becomes of it here.

One that changes no output here is ignored, and one warning names all of these. One that another argument means is
renamed; llama.cpp's are read too. Every other one must have the value that asks for nothing, or is rejected with an
error that names it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from paceline.config import SamplingParams
from paceline.errors import ConfigError
from paceline.utils import integer, need, reject_unknown, same, say_ignored, shortened, unknown_names

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer

logger = logging.getLogger("paceline")

IGNORED: Final = frozenset(
    """additional_config aggregate_engine_logging all2all_backend allowed_local_media_path allowed_media_domains
    async_scheduling attention_backend attention_config attn_implementation block_size collect_detailed_traces
    compilation_config cuda_graph_sizes cudagraph_capture_sizes data_parallel_backend disable_async_output_proc
    disable_cascade_attn disable_custom_all_reduce disable_frontend_multiprocessing disable_hybrid_kv_cache_manager
    disable_log_requests disable_log_stats disable_mm_preprocessor_cache distributed_executor_backend
    enable_chunked_prefill enable_dbo enable_eplb enable_log_requests enforce_eager expert_placement_strategy
    fully_sharded_loras gdn_prefill_backend guided_decoding_backend ignore_patterns kv_offloading_backend
    kv_sharing_fast_prefill language_model_only limit_mm_per_prompt long_prefill_token_threshold lora_dtype
    low_cpu_mem_usage mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype
    max_context_len_to_capture max_cpu_loras max_logprobs max_long_partial_prefills max_lora_rank max_loras
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture mm_processor_cache_gb
    mm_processor_kwargs model_impl model_loader_extra_config num_gpu_blocks_override num_lookahead_slots
    num_scheduler_steps offload_buffers offload_folder offload_group_size offload_num_in_group offload_params
    offload_prefetch_step optimization_level otlp_traces_endpoint performance_mode preemption_mode
    prefix_caching_hash_algo profiler_config pt_load_map_location ray_workers_use_nsight reasoning_parser
    safetensors_load_strategy served_model_name shutdown_timeout skip_mm_profiling stream_interval
    structured_outputs_config swap_space use_cache use_fast use_tqdm_on_load use_v2_block_manager
    flash_attn main_gpu n_batch n_threads_batch n_ubatch numa offload_kqv use_mlock use_mmap verbose
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
"""They choose how other engines use their machine, and no output depends on them."""

ONE_DEVICE: Final = "a model runs on one device"
MERGED: Final = "an adapter is merged into the weights, with lora=FOLDER"
RAW: Final = "the checkpoint is read as it is"
HUB: Final = "set the environment variable {} of huggingface_hub instead"

NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "tensor_parallel_size": ((1,), ONE_DEVICE),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "prefill_context_parallel_size": ((1,), ONE_DEVICE),
    "decode_context_parallel_size": ((1,), ONE_DEVICE),
    "nnodes": ((1,), ONE_DEVICE),
    "enable_expert_parallel": ((False,), ONE_DEVICE),
    "max_memory": ((), ONE_DEVICE),
    "cpu_offload_gb": ((0,), "weights stay on one device; quantization='int8' halves them"),
    "kv_offloading_size": ((0,), "keys and values stay on the model's device"),
    "load_format": (("auto", "safetensors", "gguf", "hf"), "weights are read from safetensors or GGUF files"),
    "use_safetensors": ((True,), "weights are read from safetensors or GGUF files"),
    "config_format": (("auto", "hf"), RAW),
    "tokenizer_mode": (("auto", "hf"), "the checkpoint's own tokenizer is used"),
    "skip_tokenizer_init": (
        (False,),
        "the tokenizer is always read; pass token ids, and SamplingParams(detokenize=False)",
    ),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "kv_cache_dtype": (("auto",), "keys and values have the model's dtype"),
    "calculate_kv_scales": ((False,), "keys and values have the model's dtype"),
    "task": (("auto", "generate"), "models generate text here"),
    "runner": (("auto", "generate"), "models generate text here"),
    "convert": (("auto", "none"), "models generate text here"),
    "pooler_config": ((), "models generate text here"),
    "logprobs_mode": (("raw_logprobs",), "logprobs are those of the model before any rule"),
    "scheduling_policy": (("fcfs", "priority"), "requests begin by priority, and then in the order of their arrival"),
    "generation_config": (("auto",), "pass SamplingParams, which replaces the checkpoint's generation_config.json"),
    "override_generation_config": (
        ({},),
        "pass SamplingParams, which replaces the checkpoint's generation_config.json",
    ),
    "hf_overrides": (({},), RAW),
    "rope_scaling": ((), RAW),
    "rope_theta": ((), RAW),
    "disable_sliding_window": ((False,), RAW),
    "ignore_mismatched_sizes": ((False,), RAW),
    "variant": ((), RAW),
    "quantization_config": ((), "quantization='int8' or 'int4' quantises weights when they are loaded"),
    "load_in_8bit": ((False,), "quantization='int8' quantises weights when they are loaded"),
    "load_in_4bit": ((False,), "quantization='int4' quantises weights when they are loaded"),
    "enable_lora": ((False,), MERGED),
    "lora_modules": ((), MERGED),
    "logits_processors": (((), []), "they are given with a request, as SamplingParams(logits_processors=[...])"),
    "enable_sleep_mode": ((False,), "close() frees the memory"),
    "worker_cls": (("auto",), "there are no workers"),
    "worker_extension_cls": ((), "there are no workers"),
    "scheduler_cls": ((), "there is one scheduler"),
    "kv_transfer_config": ((), ONE_DEVICE),
    "weight_transfer_config": ((), RAW),
    "override_attention_dtype": ((), "attention has the model's dtype"),
    "enable_return_routed_experts": ((False,), "results hold no routing"),
    "hf_config_path": ((), RAW),
    "subfolder": (("",), "download the checkpoint, and pass its folder as model"),
    "chat_template": ((), "it is given with a conversation, as chat(messages, chat_template=...)"),
    "tokenizer_revision": ((), "download the tokenizer, and pass its folder as tokenizer"),
    "code_revision": ((), "download the checkpoint, and pass its folder as model"),
    "download_dir": ((), HUB.format("HF_HUB_CACHE")),
    "cache_dir": ((), HUB.format("HF_HUB_CACHE")),
    "token": ((True, False), HUB.format("HF_TOKEN")),
    "hf_token": ((True, False), HUB.format("HF_TOKEN")),
    "use_auth_token": ((True, False), HUB.format("HF_TOKEN")),
    "local_files_only": ((False,), HUB.format("HF_HUB_OFFLINE=1")),
    "force_download": ((False,), "remove the model from the cache instead"),
    "speculative_model": ((), "write speculative_config={'model': ...}"),
    "num_speculative_tokens": ((), "write speculative_config={'num_speculative_tokens': ...}"),
}
"""Argument -> the values beside None under which it asks for nothing, and why it may have no other."""

MEANT: Final[Mapping[str, str]] = {
    "pretrained_model_name_or_path": "model",
    "model_id": "model",
    "model_path": "model",
    "max_length": "max_model_len",
    "max_new_tokens": "SamplingParams(max_tokens=...)",
    "max_tokens": "SamplingParams(max_tokens=...)",
    "temperature": "SamplingParams(temperature=...)",
    "draft_model": "write speculative_config={'model': ...}",
    "assistant_model": "write speculative_config={'model': ...}",
    "prompt_lookup_num_tokens": "speculative_config='ngram'",
}
"""Names that look like none of ours -> what to write, or a sentence."""

CALLS: Final[Mapping[str, str]] = {
    "prompt_token_ids": "prompts may hold token ids",
    "input_ids": "prompts may hold token ids",
    "max_new_tokens": "SamplingParams(max_tokens=...)",
    "do_sample": "SamplingParams(temperature=...)",
    "prediction": 'a prompt may be {"prompt": ..., "prediction": ...}',
    "num_beams": 'search={"method": "beam", "beam_width": ...}',
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "give LLM a speculative_config"),
    **{one.name: f"SamplingParams({one.name}=...)" for one in fields(SamplingParams)},
}
"""Arguments of the methods of `LLM` as other libraries have them -> what to write, or a sentence."""

IDLE_CALLS: Final[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
    ("priority", "tokenization_kwargs", "guided_options_request", "prompt_token_ids"), ()
)
"""Those that ask for nothing where they are None."""

ATTRIBUTES: Final[Mapping[str, str]] = {
    "llm_engine": "see config, runner.info and engine",
    "model_config": "see config and runner.info",
    "encode": "call embed(texts)",
    **dict.fromkeys(("classify", "reward"), "models generate text here"),
    "score": "models generate text here; a server ranks texts with --rerank-model",
    **dict.fromkeys(("sleep", "wake_up", "shutdown"), "close() frees the memory"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model is runner, in this process"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use a profiler of PyTorch around generate"),
    "set_tokenizer": "pass tokenizer=... to LLM",
    "get_metrics": "each result has metrics of its own",
    **dict.fromkeys(("from_pretrained", "from_engine_args"), "call LLM(model)"),
    "create_chat_completion": "call chat(messages), or serve the model",
    "create_completion": "call generate(prompt), or serve the model",
}
"""Attributes of other libraries' models -> what to do instead."""

OF_TEMPLATES: Final = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "documents")
"""Arguments that every chat template takes; one that reads no tools says so itself."""

ALIASES: Final = ("torch_dtype", "device_map", "n_ctx", "n_threads", "n_gpu_layers")
"""Other names of arguments of ours, of transformers and llama.cpp."""

DTYPES: Final[Mapping[str, str]] = {"float": "float32", "half": "float16"}
"""vLLM's other names of dtypes."""


@dataclass(frozen=True, slots=True)
class Meant:
    """Arguments of ours that have other names elsewhere: torch_dtype; device_map and n_gpu_layers; n_ctx; n_threads."""

    dtype: Any
    device: Any
    max_model_len: Any
    threads: Any


def translated(others: Mapping[str, Any], ours: Meant, *, own: Iterable[str], cuda: bool) -> Meant:
    """What is meant, after a look at what is no argument of ours.

    Args:
        others: what was given beside our own arguments.
        ours: what was given by our names.
        own: the names of our arguments.
        cuda: where the device is "auto", there is a CUDA device.
    Raises:
        ConfigError: names all that cannot be honoured and all that nobody knows.
    """
    given, wrong = dict(others), []
    dtype, device, max_model_len, threads = ours.dtype, ours.device, ours.max_model_len, ours.threads
    try:
        dtype = _one_of(given, "torch_dtype", "dtype", dtype)
        device = _device(_one_of(given, "device_map", "device", device))
        device = _of_layers(_one_of(given, "n_gpu_layers", "device", None), device)
        if given.get("n_ctx") == 0:  # there it means the model's own
            given["n_ctx"] = None
        max_model_len = _one_of(given, "n_ctx", "max_model_len", max_model_len)
        threads = _one_of(given, "n_threads", "threads", threads)
    except ConfigError as error:
        wrong.append(str(error))
    cuda = device.startswith("cuda") or (device == "auto" and cuda) if isinstance(device, str) else False
    for key in [key for key in given if key in NEUTRAL]:
        values, why = NEUTRAL[key]
        if not (given[key] is None or any(same(given[key], one) for one in values)):
            rule = f"be {' or '.join(map(repr, values))}" if values else "be left out"
            wrong.append(f"{key} must {rule}, got {shortened(given[key], 60)} ({why})")
    if cuda and given.get("gpu_memory_utilization") is not None:
        wrong.append("gpu_memory_utilization is not available: kv_cache_memory_bytes limits keys and values")
    known = {"gpu_memory_utilization", *IGNORED, *NEUTRAL}
    if text := _unknown(
        [key for key in given if key not in known],
        [*own, *ALIASES],
        known,
    ):
        wrong.append(text)
    if wrong:
        raise ConfigError("; ".join(wrong))
    say_ignored(given)
    return Meant(_dtype(dtype, cuda=cuda), device, max_model_len, threads)


def _of_layers(layers: Any, device: Any) -> Any:
    """The device that llama.cpp's n_gpu_layers means: 0 is the CPU, any other number a GPU where there is one."""
    if layers is None:
        return device
    integer("n_gpu_layers", layers, -1)
    if device not in (None, "auto"):
        raise ConfigError("n_gpu_layers and device say the same; give one of them")
    return "auto" if layers else "cpu"


def _unknown(unknown: Sequence[str], own: Sequence[str], known: Iterable[str]) -> str:
    """What is said of names that nobody knows: ours are offered before those that are ignored."""
    meant = dict(MEANT)
    for key in unknown:
        if key not in meant and not get_close_matches(key, own, n=1) and (near := get_close_matches(key, known, n=1)):
            meant[key] = near[0]
    return unknown_names("LLM", unknown, own, meant=meant)


def _one_of(given: dict[str, Any], alias: str, name: str, value: Any) -> Any:
    """The value of an argument that has another name elsewhere; taken out of `given`."""
    other = given.pop(alias, None)
    if other is None:
        return value
    if value not in (None, "auto"):
        raise ConfigError(f"{alias} and {name} mean the same; give one of them")
    return other


def _device(device: Any) -> Any:
    """Of a `device_map`, the device that has the whole model; an object of PyTorch by its name."""
    if isinstance(device, Mapping) and list(device) == [""]:
        device = device[""]
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    if isinstance(device, Mapping) or device in ("balanced", "balanced_low_0", "sequential", "disk", "meta"):
        raise ConfigError(f"device_map must be 'auto' or one device, got {shortened(device, 60)} ({ONE_DEVICE})")
    return str(device) if type(device).__module__ == "torch" else device


def _dtype(dtype: Any, *, cuda: bool) -> Any:
    """The dtype by our name; an object of PyTorch by its own. float16 under its short name is what vLLM's examples say
    where a GPU of any age must run them: compiled passes on CPUs take bfloat16 and float32.
    """
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" or isinstance(dtype, str) else dtype
    if name == "half" and not cuda:
        logger.warning(
            "dtype='half' runs as bfloat16 on a CPU, whose compiled passes do not cover float16; dtype='float16' "
            "insists on it"
        )
        return "bfloat16"
    return DTYPES.get(name, name) if isinstance(name, str) else name


def chat_names(
    method: Callable[..., Any], tokenizer: Tokenizer, others: Mapping[str, Any], more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The names that a call of `chat` gives the chat template.

    Args:
        method: that was called. others: arguments of the call that it does not have itself.
        more: its `chat_template_kwargs`.
    Raises:
        ConfigError: an argument that neither the method nor the template knows, or `more` is no dict.
    """
    need(more is None or isinstance(more, Mapping), "chat_template_kwargs", "be a dict", more)
    own = set(inspect.signature(method).parameters) - {"self", "template"}
    known = {*own, *OF_TEMPLATES, *tokenizer.template(others.get("chat_template")).variables}
    sampling = SamplingParams.__dataclass_fields__  # of which the template tells
    mistyped = [name for name, value in others.items() if value is not None and name not in sampling]
    reject_unknown(method.__qualname__, mistyped, sorted(known), meant=CALLS)
    return {**others, **(more or {})}


def absent(owner: str, name: str) -> str:
    """What an AttributeError says of a name that a class of ours lacks."""
    return f"{owner} has no attribute {name!r}" + (f"; {ATTRIBUTES[name]}" if name in ATTRIBUTES else "")


class Named(type):
    """Says of what the class does not have what to do instead, as its objects do."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(absent(cls.__name__, name), name=name, obj=cls)
