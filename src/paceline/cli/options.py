"""Command-line flags made from the fields of the configuration classes, so that a new field is a new flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import typer

from paceline.cli.interrupts import raise_from_now_on
from paceline.cli.prompts import text_or_file
from paceline.cli.terminal import set_log_level
from paceline.config import EngineConfig, SamplingParams, ServerConfig, StructuredOutputsParams, options_of
from paceline.errors import ConfigError
from paceline.utils import json_object, json_value, need, shortened

if TYPE_CHECKING:
    from paceline.llm import LLM

METAVARS: Final[dict[type, str | None]] = {bool: None, int: "INT", float: "FLOAT", str: "TEXT", Path: "FILE"}
WORDS: Final[dict[type, str]] = {int: "an integer", float: "a number"}
DEFAULT_MAX_TOKENS: Final = 256

Form = Literal["one", "repeated", "with commas"]
"""How values are typed."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line. Its value comes as text, so that what is no number gets a line like every other
    wrong value.

    Attributes:
        name: of the argument. help: its line.
        kind: of a value: str, int, float, bool or Path. form: how values are typed.
        metavar: what stands for the value; None is that of its kind.
        spelled, short: names of the flag; "" is the argument's name, and none. panel: of the help.
        unit: what is typed counts so many times.
        default: what help shows, where it was not typed; MISSING has to be typed.
        hidden: from help.
        variable: of the environment, which is read where the flag is not typed; "" is none.
    """

    name: str
    help: str
    kind: type = str
    form: Form = "one"
    metavar: str | None = None
    spelled: str = ""
    short: str = ""
    panel: str | None = None
    unit: int = 1
    default: Any = None
    hidden: bool = False
    variable: str = ""

    @property
    def typed(self) -> str:
        """Give the flag as it is typed."""
        return "--" + (self.spelled or self.name).replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """Make the parameter of a command of typer."""
        is_bool, repeated = self.kind is bool, self.form == "repeated"
        names = [f"{self.typed}/--no-{self.typed[2:]}" if self.default is True else self.typed]
        names += [self.short] if self.short else []
        metavar = self.metavar or METAVARS[self.kind]
        kind: Any = bool if is_bool else list[str] if repeated else str
        default: Any = self.default is True if is_bool else None if self.default is None else str(self.default)
        if self.default is MISSING:
            default = inspect.Parameter.empty
        elif not is_bool:
            kind = kind | None
        option = typer.Option(
            *names, metavar=metavar, help=self.help, rich_help_panel=self.panel, hidden=self.hidden,
            envvar=self.variable or None, show_envvar=False,
        )  # fmt: skip
        annotation = Annotated[kind, option]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, typed: Any) -> Any:
        """What was typed, as a number where it must be one.

        Raises:
            ConfigError: not a number.
        """
        if self.form == "repeated":
            return [self._one(text) for text in typed]
        if self.form == "with commas":
            return tuple(self._one(text, typed) for text in typed.split(","))
        return self._one(typed)

    def _one(self, text: Any, whole: str = "") -> Any:
        """One value, of a whole list or alone."""
        if self.kind in (str, bool):
            return text
        try:
            return int(float(text) * self.unit) if self.unit != 1 else self.kind(text)
        except (ValueError, OverflowError):
            rule = "numbers with commas between, such as 0,4,9" if whole else WORDS[self.kind]
            raise ConfigError(f"{self.typed} must be {rule}, got {shortened(whole or text)}") from None


def flags_of(config: type, panel: str | None, *, defaults: bool = False) -> tuple[Flag, ...]:
    """The flags of a configuration class: its fields with a help text.

    Args:
        defaults: help shows those of the class, which are given where nothing was typed.
    """
    hints, flags = get_type_hints(config), []
    usual = {field.name: field.default for field in fields(config)}
    for name, option in options_of(config).items():
        if not option.help:
            continue
        kind, form = _kind(hints[name])
        shown: Any = usual[name] if defaults or usual[name] is True or usual[name] is MISSING else None
        if option.unit != 1:
            kind, shown = float, None if shown is None else shown / option.unit
        elif form == "with commas" and shown is not None:
            shown = ",".join(map(str, shown))
        flag = Flag(name, option.help, kind, form, option.metavar or None, option.flag, "", panel, option.unit, shown)
        flags.append(flag)
    return tuple(flags)


def _kind(hint: Any) -> tuple[type, Form]:
    """What a field's value is made of, and how it is typed; what is neither number nor path is a text."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if isinstance(hint, UnionType) else [hint]
    for kind in kinds:
        if get_origin(kind) in (Sequence, tuple) and get_args(kind)[0] in METAVARS:
            return get_args(kind)[0], "repeated" if get_origin(kind) is Sequence else "with commas"
    return (kinds[0] if kinds[0] in METAVARS else str), "one"


def _in_panel(panel: str, *flags: Flag) -> tuple[Flag, ...]:
    return tuple(replace(flag, panel=panel) for flag in flags)


MODEL_FLAGS: Final = _in_panel(
    "Model",
    Flag("model", "Folder or hub id; default: the bundled model.", short="-m", metavar="MODEL"),
    Flag("speculative_config", 'How to draft: a method, as ngram, or JSON, as {"method": "ngram"}; null decodes '
         "plainly. Default: what `paceline tune` chose, else auto.", short="-s", metavar="METHOD"),
    Flag("tokenizer", "Folder or hub id of the tokenizer; default: the model's own.", metavar="MODEL"),
    Flag("revision", "Branch, tag or commit on the hub.", metavar="NAME"),
    Flag("gguf_file", "The file meant in a folder or repository of GGUF files.", metavar="NAME"),
    Flag("lora", "Folder of a LoRA adapter, merged into the weights.", metavar="FOLDER"),
    Flag("trust_remote_code", "Run code that comes with the checkpoint.", bool),
    Flag("n_ctx", "llama.cpp's --max-model-len; 0 is the model's own.", int, short="--ctx-size", hidden=True),
    Flag("n_threads", "llama.cpp's --threads.", int, hidden=True),
    Flag("n_gpu_layers", "llama.cpp's; 0 is --device cpu.", int, short="-ngl", hidden=True),
)  # fmt: skip
"""Arguments of LLM that are fields of no configuration class."""

TEMP: Final = Flag("temp", "llama.cpp's --temperature.", float, panel="Sampling", hidden=True)
"""Another name of the flag."""

DIFFUSION_FLAGS: Final = _in_panel(
    "Diffusion language models",
    Flag("dllm_unmasking_strategy",
         "Which slots are written: a method of `paceline methods`, low_confidence_dynamic, ...", metavar="NAME"),
    Flag("dllm_block_length", "Slots per block; default: the model's, or the whole text.", int),
    Flag("dllm_denoising_steps", "Rounds per block, where the method has a fixed number.", int),
    Flag("dllm_confidence_threshold",
         "Slots of at least this confidence are written, where the method has a threshold.", float),
    Flag("diffusion_config",
         'The whole configuration, as {"method": "factor", "cache": "dual"}, or the name of a method.', metavar="JSON"),
)  # fmt: skip
"""Keys of `diffusion_config`, and the whole."""


def _log_level(level: str | None) -> None:
    if level is not None:
        set_log_level(level)


def with_flags(
    *,
    sampling: bool,
    diffusion: bool = False,
    server: Iterable[str] = (),
    more: Iterable[Flag] = (),
    environment: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose last parameter is `flag_values: dict`.

    It gets the flags of the model, of SamplingParams, --log-level, and with `diffusion` those of diffusion language
    models, those of ServerConfig that `server` names, and those of `more`.

    What the user did not type is absent from `flag_values`; numbers in it are numbers. With `environment` a flag that
    is not typed is read from the variable that `variable_of` names.
    """
    flags = [
        *more,
        *MODEL_FLAGS,
        *(DIFFUSION_FLAGS if diffusion else ()),
        *flags_of(EngineConfig, "Model"),
    ]
    if sampling:
        flags += [*flags_of(SamplingParams, "Sampling"), *flags_of(StructuredOutputsParams, "Sampling"), TEMP]
    wanted = set(server)
    flags += [flag for flag in flags_of(ServerConfig, "Server") if flag.name in wanted]
    if environment:
        flags = [replace(flag, variable=variable_of(flag)) for flag in flags]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "flag_values"
        ]

        def command(**arguments: Any) -> None:
            typed = {flag: arguments.pop(flag.name) for flag in flags}
            flag_values = {flag.name: flag.value(value) for flag, value in typed.items() if not _absent(value, flag)}
            if TEMP.name in flag_values:
                if "temperature" in flag_values:
                    raise ConfigError("--temp and --temperature mean the same; give one of them")
                flag_values["temperature"] = flag_values.pop(TEMP.name)
            chosen = {flag.name: flag_values.pop(flag.name) for flag in DIFFUSION_FLAGS if flag.name in flag_values}
            if (config := _diffusion_config(chosen)) is not None:
                flag_values["diffusion_config"] = config
            function(**arguments, flag_values=flag_values)

        made = _with_signature(command, function, [*parameters, *(flag.parameter() for flag in flags)])
        return with_log_level(made, "PACELINE_LOG_LEVEL" if environment else None)

    return decorate


def variable_of(flag: Flag) -> str:
    """The variable of the environment for a flag; none for keys, which `paceline.serving.read_keys` adds itself."""
    return "" if flag.name in ("api_key", "admin_key") else f"PACELINE_{flag.typed[2:].replace('-', '_').upper()}"


def with_log_level(function: Callable[..., None], variable: str | None = None) -> Callable[..., None]:
    """Decorate a command: it takes --log-level too, which acts before it runs.

    Args:
        variable: of the environment, which is read where the flag is not typed.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    help_text = "debug, info, warning or error."
    option = typer.Option(
        "--log-level", metavar="LEVEL", callback=_log_level, help=help_text, envvar=variable, show_envvar=False
    )
    kind = Annotated[str | None, option]
    level = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)

    def command(log_level: str | None = None, **arguments: Any) -> None:
        function(**arguments)

    return _with_signature(command, function, [*parameters, level])


def _with_signature(
    command: Callable[..., None], like: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__, command.__name__ = like.__doc__, like.__name__
    return command


def _absent(value: Any, flag: Flag) -> bool:
    return value is None or value == [] or (value is False and flag.default is not True)


def _diffusion_config(typed: dict[str, Any]) -> dict[str, Any] | str | None:
    """One `diffusion_config` of the flags that were typed; None where none was.

    Raises:
        ConfigError: JSON that says the same as a flag.
    """
    whole = typed.pop("diffusion_config", None)
    if whole is None or not typed:
        return whole if whole is not None else typed or None
    from paceline.diffusion import canonical, parse_config

    config = parse_config(whole)
    known = {canonical(key): key for key in config}
    for name in typed:
        if (other := known.get(canonical(name))) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} and {other!r} in --diffusion-config mean the same; give one of them"
            )
    return config | typed


def engine_options(flag_values: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `LLM` among what was typed; a seed serves both."""
    names = (*(flag.name for flag in MODEL_FLAGS), *(field.name for field in fields(EngineConfig)), "diffusion_config")
    return {name: flag_values[name] for name in names if name in flag_values}


def sampling_params(flag_values: dict[str, Any], llm: LLM, **defaults: Any) -> SamplingParams:
    """SamplingParams from what was typed, on top of the checkpoint's defaults; greedy by default.

    Raises:
        ConfigError: a value outside its range, or a logit bias that is not JSON.
    """
    base = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS}
    return SamplingParams.from_dict({**base, **llm.defaults.sampling, **defaults, **_typed(flag_values)})


def check_sampling(flag_values: dict[str, Any]) -> None:
    """Reject what is wrong in itself before a model is loaded for it.

    Raises:
        ConfigError: a value outside its range, a contradiction, or a logit bias that is not JSON.
    """
    SamplingParams.from_dict({"max_tokens": None, **_typed(flag_values)})


def _typed(flag_values: dict[str, Any]) -> dict[str, Any]:
    typed = {name: flag_values[name] for name in options_of(SamplingParams) if name in flag_values}
    if "logit_bias" in typed:
        typed["logit_bias"] = json_object("--logit-bias", typed["logit_bias"])
    if "canvas" in typed:
        typed["canvas"] = json_value("--canvas", text_or_file("--canvas", typed["canvas"]))
    if "think" in typed:
        typed["think"] = json_value("--think", typed["think"])
    bound = {
        flag: flag_values[flag.name]
        for flag in flags_of(StructuredOutputsParams, "Sampling")
        if flag.name in flag_values
    }
    if bound:
        flags = " and ".join(flag.typed for flag in bound)
        need(len(bound) == 1, "the constraint", "be one of --json-schema, --regex and --grammar", flags)
        ((flag, text),) = bound.items()
        text = text if flag.name == "regex" else text_or_file(flag.typed, text)
        typed["structured_outputs"] = {flag.name: text}
    return typed


def open_llm(flag_values: dict[str, Any], *, timed: bool = False, diffusion: bool = False, speech: bool = False) -> LLM:
    """Load the model with what was typed; from then on Ctrl-C raises KeyboardInterrupt.

    Args:
        timed: prompts will be decoded again and again to be timed, so that none may profit from the last time.
        diffusion: the command serves diffusion language models too. speech: likewise, models that read speech.
    Raises:
        ConfigError: a diffusion language model, or one that reads speech, where the command serves none.
    """
    if not diffusion:
        reject_diffusion(flag_values)
    from paceline.llm import LLM

    llm = LLM(**engine_options(flag_values), enable_prefix_caching=not timed)
    if not speech:
        must_read_text(llm, flag_values)
    raise_from_now_on()
    return llm


def must_read_text(llm: LLM, flag_values: dict[str, Any]) -> None:
    """Reject a model that reads speech.

    Raises:
        ConfigError: it does.
    """
    if llm.source is not None and llm.source.reads != "encoder_tokens":
        name = flag_values.get("model")
        raise ConfigError(f"{name} reads speech, no text; `paceline transcribe` and `paceline serve` are for it")


def model_path(flag_values: dict[str, Any]) -> Path:
    """Where the model of the flags is on disk, downloaded if need be."""
    from paceline.checkpoints import resolve

    return resolve(flag_values["model"], revision=flag_values.get("revision"), gguf_file=flag_values.get("gguf_file"))


def reject_diffusion(flag_values: dict[str, Any]) -> None:
    """For commands that time or examine an engine.

    Raises:
        ConfigError: the model is a diffusion language model.
    """
    from paceline.checkpoints import is_denoiser, read_config

    if "model" in flag_values and is_denoiser(read_config(model_path(flag_values))):
        name = flag_values["model"]
        raise ConfigError(
            f"{name} is a diffusion language model, which only `paceline generate` and `paceline chat` decode"
        )
