"""Command-line flags made from the fields of the configuration classes, so that a new field is a new flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.interrupts import raise_from_now_on
from paceline.cli.prompts import text_or_file
from paceline.cli.terminal import set_log_level
from paceline.config import TOOL_FORMATS, EngineConfig, SamplingParams, ServerConfig
from paceline.errors import ConfigError
from paceline.utils import json_object, json_value, need, shortened

if TYPE_CHECKING:
    from paceline.llm import LLM

SAMPLING_HELP = {
    "n": "Outputs per prompt.",
    "temperature": "0 is greedy. Default: the checkpoint's generation_config.json, else 0.",
    "top_p": "Keep the most likely tokens whose probabilities sum to this.",
    "top_k": "Keep this many most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely relative to the most likely one.",
    "presence_penalty": "Subtracted from tokens that were generated before.",
    "frequency_penalty": "Subtracted once per earlier occurrence.",
    "repetition_penalty": "Divides the logits of tokens seen in prompt or output.",
    "logit_bias": 'JSON object of token id -> bias, as {"5": -100}.',
    "allowed_token_ids": "Token id that may be generated, and no others; may be repeated.",
    "bad_words": "A word that must not be generated; may be repeated.",
    "steering": 'Change the distribution by a method, as dola, or JSON, as {"method": "cfg", "guidance_scale": 1.5}.',
    "canvas": 'Of diffusion models: text given in the answer, as ["The answer is ", 5]; numbers are slots to fill.',
    "think": 'Of diffusion models: most tokens of thoughts before the answer, or JSON, as {"max_tokens": 256}.',
    "seed": "Same seed, same text.",
    "stop": "Text that ends the output; may be repeated.",
    "stop_token_ids": "Token id that ends the output; may be repeated.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "max_tokens": "Maximum number of new tokens. Default: the checkpoint's, else 256.",
    "min_tokens": "Minimum number of new tokens.",
    "logprobs": "Report this many of the most likely tokens per position, -1 all (with --json).",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "truncate_prompt_tokens": "Use this many tokens of the prompt's end; -1: what leaves room for --max-tokens.",
    "ignore_eos": "Continue after an end token.",
}
SERVER_HELP = {
    "host": "Address to listen on.",
    "port": "Port; 0 takes a free one. Default: 8000.",
    "served_model_name": "Name of the model in requests and answers; may be repeated.",
    "api_key": "Key that clients must give; may be repeated. Or PACELINE_API_KEY.",
    "api_key_file": "File with one key a line.",
    "admin_key": "Key that shows everybody's requests on the live page; may be repeated. Or PACELINE_ADMIN_KEY.",
    "admin_key_file": "File with one such key a line.",
    "log_requests": "Log prompts, and show texts to these keys.",
    "allowed_host": "Name that the Host header may have, beside this machine's; may be repeated.",
    "allowed_origins": "Origin of pages that may use the server, as https://example.org, * or a JSON list; repeatable.",
    "chat_template": "File of a chat template that replaces the model's.",
    "allow_special_tokens": "What messages spell like special tokens becomes them.",
    "tool_call_parser": f"How the model writes calls: {', '.join(TOOL_FORMATS)}. Default: as the chat template has it.",
    "strict_schemas": "Reject JSON schemas that cannot be enforced, where requests do not say strict.",
    "lenient_fields": "Ignore fields that cannot be honoured, and name them in the header x-ignored-fields.",
    "vllm_metrics": "Give metrics vLLM's own names.",
    "max_waiting": "Maximum number of requests that wait; more are answered 429.",
    "max_streams_per_key": "Maximum number of requests of a key that run at once.",
    "max_outputs_per_key": "Maximum number of outputs of a key, prompts times n, that run or wait at once.",
    "max_body_bytes": "Maximum length of a request.",
    "max_n": "Maximum number of outputs of a request.",
    "max_prompts": "Maximum number of prompts of a request.",
    "max_request_tokens": "Maximum number of new tokens that a request may ask for; default: any.",
    "receive_timeout": "Seconds in which a request's head, and then its body, must have arrived.",
    "request_timeout": "Seconds that a request may take.",
    "drain_timeout": "Seconds that running requests have to end when the server stops.",
    "response_file": "File that stored responses are kept in; default: memory.",
    "max_response_bytes": "Maximum length of all stored responses; the oldest are forgotten. Default: 256 MiB.",
    "max_response_age": "Seconds after which a stored response is forgotten; default: 30 days.",
}
CONSTRAINT_HELP = {
    "json_schema": ("JSON", "The output is JSON that satisfies this schema; @FILE reads a file."),
    "regex": ("REGEX", "The output matches this regular expression."),
    "grammar": ("TEXT", "The output follows this grammar, in Lark's notation or GBNF; @FILE reads a file."),
}
"""Flags of `structured_outputs`."""

ENGINE_HELP = {
    "dtype": "auto, float32, bfloat16 or float16.",
    "device": "auto, cpu, cuda or cuda:N.",
    "max_model_len": "Maximum length of a sequence; default: the checkpoint's.",
    "threads": "CPU threads; default: PyTorch's setting.",
    "kv_cache_memory_bytes": "Maximum memory for keys and values, in bytes; default: 0.6 of what is free.",
    "speculative_memory_bytes": (
        "Maximum memory for draft trees and the caches of draft models, in bytes; default: no limit."
    ),
    "quantization": (
        "int8 or int4 rounds the weights when they are loaded, none keeps them; default: none; GGUF files keep their "
        "blocks where they can, else int8 or int4."
    ),
    "activation_bits": "8 or 16, of what the blocks of a GGUF file are multiplied with; default: 8.",
    "exactness": "strict: bit for bit the tokens of plain decoding, or an error; default: auto.",
}
INTEGERS = (
    "n",
    "top_k",
    "seed",
    "allowed_token_ids",
    "stop_token_ids",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "max_model_len",
    "activation_bits",
    "threads",
    "kv_cache_memory_bytes",
    "speculative_memory_bytes",
    "dllm_block_length",
    "dllm_denoising_steps",
    "port",
    "max_waiting",
    "max_streams_per_key",
    "max_outputs_per_key",
    "max_body_bytes",
    "max_n",
    "max_prompts",
    "max_request_tokens",
    "max_response_bytes",
)
TEXTS = (
    "logit_bias",
    "bad_words",
    "steering",
    "canvas",
    "think",
    "stop",
    *CONSTRAINT_HELP,
    "dtype",
    "device",
    "exactness",
    "quantization",
    "dllm_unmasking_strategy",
    "host",
    "served_model_name",
    "api_key",
    "api_key_file",
    "response_file",
    "admin_key",
    "admin_key_file",
    "allowed_host",
    "allowed_origins",
    "chat_template",
    "tool_call_parser",
)
LISTS = (
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "served_model_name",
    "api_key",
    "admin_key",
    "allowed_host",
    "allowed_origins",
)
SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "log_requests",
    "allow_special_tokens",
    "strict_schemas",
    "lenient_fields",
    "vllm_metrics",
)
METAVARS = {"logit_bias": "JSON", "steering": "METHOD", "canvas": "JSON", "think": "JSON"} | dict.fromkeys(
    ("dtype", "device", "exactness", "quantization"), "NAME"
)
DEFAULT_MAX_TOKENS = 256


def _model_flag(
    name: str, kind: Any, default: Any, help: str, *, short: str = "", metavar: str | None = None
) -> inspect.Parameter:
    names = ["--" + name.replace("_", "-"), *([short] if short else [])]
    annotation = Annotated[kind, typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model")]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


Text = str | None
MODEL_FLAGS = (
    _model_flag("model", Text, None, "Folder or hub id; default: the bundled model.", short="-m", metavar="MODEL"),
    _model_flag(
        "speculative_config",
        Text,
        None,
        'How to draft: a method, as ngram, or JSON, as {"method": "ngram"}; null decodes plainly. Default: what '
        "`paceline tune` chose, else auto.",
        short="-s",
        metavar="METHOD",
    ),
    _model_flag(
        "tokenizer", Text, None, "Folder or hub id of the tokenizer; default: the model's own.", metavar="MODEL"
    ),
    _model_flag("revision", Text, None, "Branch, tag or commit on the hub.", metavar="NAME"),
    _model_flag("gguf_file", Text, None, "The file meant in a folder or repository of GGUF files.", metavar="NAME"),
    _model_flag("lora", Text, None, "Folder of a LoRA adapter, merged into the weights.", metavar="FOLDER"),
    _model_flag("trust_remote_code", bool, False, "Run code that comes with the checkpoint."),
)
"""Arguments of LLM that are fields of no configuration class."""


DIFFUSION_HELP = {
    "dllm_unmasking_strategy": (
        "NAME",
        "Which slots are written: a method of `paceline methods`, low_confidence_dynamic, ...",
    ),
    "dllm_block_length": ("INT", "Slots per block; default: the model's, or the whole text."),
    "dllm_denoising_steps": ("INT", "Rounds per block, where the method has a fixed number."),
    "dllm_confidence_threshold": (
        "FLOAT",
        "Slots of at least this confidence are written, where the method has a threshold.",
    ),
    "diffusion_config": (
        "JSON",
        'The whole configuration, as {"method": "factor", "cache": "dual"}, or the name of a method.',
    ),
}


def _text_flag(name: str, metavar: str, text: str, panel: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), metavar=metavar, help=text, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


DIFFUSION_FLAGS = tuple(_text_flag(name, *rest, "Diffusion language models") for name, rest in DIFFUSION_HELP.items())
CONSTRAINT_FLAGS = tuple(_text_flag(name, *rest, "Sampling") for name, rest in CONSTRAINT_HELP.items())


def _log_level(level: str | None) -> None:
    if level is not None:
        set_log_level(level)


LogLevel = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", callback=_log_level, help="debug, info, warning or error.")
]


def _parameter(field: Field[Any], text: str, panel: str) -> inspect.Parameter:
    """The flag of a field. Numbers come as text, so that what is no number gets a line like every other wrong value."""
    name = field.name
    kind: Any = bool if name in SWITCHES else (list[str] | None if name in LISTS else str | None)
    metavar = (
        None
        if name in SWITCHES
        else METAVARS.get(name, "TEXT" if name in TEXTS else "INT" if name in INTEGERS else "FLOAT")
    )
    option = typer.Option("--" + name.replace("_", "-"), metavar=metavar, help=text, rich_help_panel=panel)
    annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False if name in SWITCHES else None, annotation=annotation
    )


def with_flags(
    *, sampling: bool, diffusion: bool = False, server: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose last parameter is `given: dict`.

    It gets the flags of the model, of SamplingParams, --log-level, and with `diffusion` those of diffusion language
    models, and those of ServerConfig that `server` names.

    What the user did not type is absent from `given`; numbers in it are numbers.
    """
    sources: list[tuple[Any, dict[str, str], str]] = [(EngineConfig, ENGINE_HELP, "Model")]
    sources += [(SamplingParams, SAMPLING_HELP, "Sampling")] if sampling else []
    sources += [(ServerConfig, {name: SERVER_HELP[name] for name in server}, "Server")]
    extra = [
        _parameter(field, texts[field.name], panel)
        for cls, texts, panel in sources
        for field in fields(cls)
        if field.name in texts
    ]
    extra += CONSTRAINT_FLAGS if sampling else ()

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "given"]
        names, of_diffusion = [parameter.name for parameter in extra], DIFFUSION_FLAGS if diffusion else ()

        def command(**arguments: Any) -> None:
            model = {flag.name: arguments.pop(flag.name) for flag in MODEL_FLAGS}
            typed = {name: arguments.pop(name) for name in names}
            given = {name: _value(name, value) for name, value in typed.items() if not _absent(value)}
            chosen = {flag.name: text for flag in of_diffusion if (text := arguments.pop(flag.name)) is not None}
            if (config := _diffusion_config(chosen)) is not None:
                given["diffusion_config"] = config
            function(**arguments, given={name: value for name, value in model.items() if not _absent(value)} | given)

        return with_log_level(_with_signature(command, function, [*own, *MODEL_FLAGS, *of_diffusion, *extra]))

    return decorate


def with_log_level(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: it takes --log-level too, which acts before it runs."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    level = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogLevel)

    def command(log_level: str | None = None, **arguments: Any) -> None:
        function(**arguments)

    return _with_signature(command, function, [*own, level])


def _with_signature(
    command: Callable[..., None], like: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__, command.__name__ = like.__doc__, like.__name__
    return command


def _absent(value: Any) -> bool:
    return value is None or value is False or value == []


def _value(name: str, typed: Any) -> Any:
    """What was typed for a flag, as a number where it must be one.

    Raises:
        ConfigError: not a number.
    """
    if isinstance(typed, bool) or name in TEXTS:
        return typed
    if isinstance(typed, list):
        return [_number(name, one) for one in typed]
    return _number(name, typed)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if name in INTEGERS else float(text)
    except ValueError:
        kind = "an integer" if name in INTEGERS else "a number"
        raise ConfigError(f"--{name.replace('_', '-')} must be {kind}, got {shortened(text)}") from None


def _diffusion_config(typed: dict[str, str]) -> dict[str, Any] | str | None:
    """One `diffusion_config` of the flags that were typed; None where none was.

    Raises:
        ConfigError: no number, or JSON that says the same as a flag.
    """
    whole = typed.get("diffusion_config")
    single = {
        name: text if name in TEXTS else _number(name, text)
        for name, text in typed.items()
        if name != "diffusion_config"
    }
    if whole is None or not single:
        return whole if whole is not None else single or None
    from paceline.diffusion import canonical, parse_config

    config = parse_config(whole)
    known = {canonical(key): key for key in config}
    for name in single:
        if (other := known.get(canonical(name))) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} and {other!r} in --diffusion-config mean the same; give one of them"
            )
    return config | single


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `LLM` among what was typed; a seed serves both."""
    names = (*(flag.name for flag in MODEL_FLAGS), *ENGINE_HELP, "max_num_seqs", "diffusion_config", "seed")
    return {name: given[name] for name in names if name in given}


def sampling_params(given: dict[str, Any], llm: LLM, **defaults: Any) -> SamplingParams:
    """SamplingParams from what was typed, on top of the checkpoint's defaults; greedy by default.

    Raises:
        ConfigError: a value outside its range, or a logit bias that is not JSON.
    """
    base = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS}
    return SamplingParams.from_dict({**base, **llm.defaults.sampling, **defaults, **_typed(given)})


def check_sampling(given: dict[str, Any]) -> None:
    """Reject what is wrong in itself before a model is loaded for it.

    Raises:
        ConfigError: a value outside its range, a contradiction, or a logit bias that is not JSON.
    """
    SamplingParams.from_dict({"max_tokens": None, **_typed(given)})


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    typed = {name: given[name] for name in SAMPLING_HELP if name in given}
    if "logit_bias" in typed:
        typed["logit_bias"] = json_object("--logit-bias", typed["logit_bias"])
    if "canvas" in typed:
        typed["canvas"] = json_value("--canvas", text_or_file("--canvas", typed["canvas"]))
    if "think" in typed:
        typed["think"] = json_value("--think", typed["think"])
    bound = {name: given[name] for name in CONSTRAINT_HELP if name in given}
    if bound:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in bound)
        need(len(bound) == 1, "the constraint", "be one of --json-schema, --regex and --grammar", flags)
        ((name, text),) = bound.items()
        text = text if name == "regex" else text_or_file(f"--{name.replace('_', '-')}", text)
        typed["structured_outputs"] = {"json" if name == "json_schema" else name: text}
    return typed


def open_llm(given: dict[str, Any], *, timed: bool = False, diffusion: bool = False) -> LLM:
    """Load the model with what was typed; from then on Ctrl-C raises KeyboardInterrupt.

    Args:
        timed: prompts will be decoded again and again to be timed, so that none may profit from the last time.
        diffusion: the command serves diffusion language models too.
    Raises:
        ConfigError: a diffusion language model where the command serves none.
    """
    if not diffusion:
        reject_diffusion(given)
    from paceline.llm import LLM

    llm = LLM(**engine_options(given), enable_prefix_caching=not timed)
    raise_from_now_on()
    return llm


def model_path(given: dict[str, Any]) -> Path:
    """Where the model of the flags is on disk, downloaded if need be."""
    from paceline.checkpoints import resolve

    return resolve(given["model"], revision=given.get("revision"), gguf_file=given.get("gguf_file"))


def reject_diffusion(given: dict[str, Any]) -> None:
    """For commands that time or examine an engine.

    Raises:
        ConfigError: the model is a diffusion language model.
    """
    from paceline.checkpoints import is_denoiser, read_config

    if "model" in given and is_denoiser(read_config(model_path(given))):
        name = given["model"]
        raise ConfigError(
            f"{name} is a diffusion language model, which only `paceline generate` and `paceline chat` decode"
        )
