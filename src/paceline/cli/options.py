"""Command-line flags made from the fields of the configuration classes, so that a new field is a new flag.

In: SamplingParams and EngineConfig. Out: a decorator for typer commands, and the objects built from what the user typed.
Not here: checking values (the classes do that).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import EngineConfig, SamplingParams
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.llm import LLM

SAMPLING_HELP = {
    "n": "Outputs per prompt.",
    "temperature": "0 is greedy. Default: the checkpoint's generation_config.json, else 0.",
    "top_p": "Keep the most likely tokens that make up this probability.",
    "top_k": "Keep this many most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely relative to the most likely one.",
    "presence_penalty": "Subtracted from tokens that were generated before.",
    "frequency_penalty": "Subtracted once per earlier occurrence.",
    "repetition_penalty": "Divides the logits of tokens seen in prompt or output.",
    "logit_bias": 'JSON object of token id -> bias, as {"5": -100}.',
    "bad_words": "A word that must not be generated; may be repeated.",
    "seed": "Same seed, same text.",
    "stop": "Text that ends the output; may be repeated.",
    "stop_token_ids": "Token id that ends the output; may be repeated.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "max_tokens": "Most new tokens.",
    "min_tokens": "Fewest new tokens.",
    "logprobs": "Report this many likely tokens per position (with --json).",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "ignore_eos": "Go on after an end token.",
}
ENGINE_HELP = {
    "dtype": "auto, float32, bfloat16 or float16.",
    "device": "auto, cpu, cuda or cuda:N.",
    "max_model_len": "Longest sequence; default: the checkpoint's.",
    "threads": "CPU threads; default: PyTorch's setting.",
}
LISTS = {"bad_words": str, "stop": str, "stop_token_ids": int}
NUMBERS = {"temperature": float, "top_p": float, "min_p": float, "presence_penalty": float, "frequency_penalty": float}
FLAGS = ("include_stop_str_in_output", "ignore_eos")
TEXTS = ("logit_bias", "dtype", "device")
DEFAULT_MAX_TOKENS = 256

Model = Annotated[str | None, typer.Option("--model", "-m", help="Folder or hub id; default: the bundled model.")]
Tokenizer = Annotated[str | None, typer.Option("--tokenizer", help="Folder or hub id, where it is not the model's own.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")]
Spec = Annotated[
    str,
    typer.Option("--speculative-config", "-s", help='JSON, as {"method": "ngram"}; null decodes plainly.'),
]
DEFAULT_SPEC = '{"method": "auto"}'


def _type(name: str) -> Any:
    if name in LISTS:
        return list[LISTS[name]] | None  # type: ignore[misc]  # a type made from a table
    if name in FLAGS:
        return bool
    return {**NUMBERS, "repetition_penalty": float, **dict.fromkeys(TEXTS, str)}.get(name, int) | None


def _parameter(field: Field[Any], text: str) -> inspect.Parameter:
    option = typer.Option("--" + field.name.replace("_", "-"), help=text)
    default = False if field.name in FLAGS else None
    annotation = Annotated[_type(field.name), option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_flags(*, sampling: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose last parameter is `given: dict`: it gets the flags of EngineConfig, and of SamplingParams.

    What the user did not type is absent from `given`.
    """
    sources = [(EngineConfig, ENGINE_HELP)] + ([(SamplingParams, SAMPLING_HELP)] if sampling else [])  # type: ignore[list-item]
    extra = [_parameter(field, texts[field.name]) for cls, texts in sources for field in fields(cls) if field.name in texts]
    unique = list({parameter.name: parameter for parameter in extra}.values())

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "given"]
        names = [parameter.name for parameter in unique]

        def command(**arguments: Any) -> None:
            typed = {name: arguments.pop(name) for name in names}
            function(**arguments, given={key: value for key, value in typed.items() if value not in (None, False, [])})

        command.__signature__ = inspect.Signature(own + unique)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {p.name: p.annotation for p in own + unique}
        command.__doc__, command.__name__ = function.__doc__, function.__name__
        return command

    return decorate


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `LLM` among what was typed; a seed serves both."""
    return {name: given[name] for name in (*ENGINE_HELP, "seed") if name in given}


def sampling_params(given: dict[str, Any], llm: LLM, **defaults: Any) -> SamplingParams:
    """SamplingParams from what was typed, on top of the checkpoint's defaults; greedy where nothing is said.

    Raises:
        ConfigError: a value outside its range, or a logit bias that is not JSON.
    """
    typed = {name: given[name] for name in SAMPLING_HELP if name in given}
    if "logit_bias" in typed:
        try:
            typed["logit_bias"] = json.loads(typed["logit_bias"])
        except json.JSONDecodeError as error:
            raise ConfigError(f"--logit-bias must be a JSON object, got {given['logit_bias']!r} ({error.msg})") from None
    base = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS}
    return SamplingParams.from_dict({**base, **llm.defaults.sampling, **defaults, **typed})


def open_llm(model: str | None, tokenizer: str | None, revision: str | None, trust: bool, spec: str, given: dict[str, Any]) -> LLM:
    """Load the model with what was typed."""
    from paceline.llm import LLM

    return LLM(
        model,
        speculative_config=spec,
        tokenizer=tokenizer,
        revision=revision,
        trust_remote_code=trust,
        **engine_options(given),
    )
