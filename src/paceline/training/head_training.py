"""`train`: from prompts to a head that drafts for a model, and a report of what it can do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from paceline.errors import CapabilityError, ConfigError
from paceline.models.heads import LAYER_KEYS, HeadConfig, write_head
from paceline.training.answers import Answer, answered, prompts_of, texts_of
from paceline.training.batches import Document, TargetView, documents_of, draft_vocabulary, packed
from paceline.training.heads import METHODS, HeadTrainer, trainer
from paceline.training.loop import Curve, Fitting, fit
from paceline.training.report import write_report
from paceline.utils import choice, integer, need, number

if TYPE_CHECKING:
    from paceline.llm import LLM

SETTINGS: Final = "training.json"
"""In a run's folder: what it is made of, so that another run does not go on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train, and on what.

    Attributes:
        method: one of METHODS.
        data: files of prompts in the formats of `paceline bench`. texts: they are learned as they are; otherwise the
            model answers them first, and its answers alone are learned.
        most_prompts: of each file. max_tokens: of an answer. sampled_share: of answers that are drawn at temperature
            0.8. held_out_share: of prompts that are judged by and not trained on; their answers are greedy.
        draft_vocab_size: tokens that the head can draft, those that are written most often.
        depths: tokens ahead; None is the method's.
        taps: layers whose states are read, where the method reads several; None is the method's.
        feature_cache_bytes: memory for states that are kept between epochs.
        fitting: the loop's.
    Raises:
        ConfigError: a value outside its range.
    """

    method: str
    data: tuple[Path, ...]
    texts: bool = False
    most_prompts: int | None = None
    max_tokens: int = 256
    sampled_share: float = 0.25
    held_out_share: float = 0.05
    draft_vocab_size: int = 8192
    depths: int | None = None
    taps: tuple[int, ...] | None = None
    feature_cache_bytes: int = 2 << 30
    fitting: Fitting = field(default_factory=Fitting)

    def __post_init__(self) -> None:
        choice("method", self.method, tuple(METHODS))
        need(bool(self.data), "data", "name at least one file", self.data)
        integer("max_tokens", self.max_tokens, 4)
        number("sampled_share", self.sampled_share, 0.0, 1.0, "be in 0..1")
        number("held_out_share", self.held_out_share, 0.0, 0.5, "be above 0 and at most 0.5", open_low=True)
        integer("draft_vocab_size", self.draft_vocab_size, 16)
        if self.depths is not None:
            integer("depths", self.depths, 1, 16)
        integer("row_tokens", self.fitting.row_tokens, 16)
        integer("batch_rows", self.fitting.batch_rows, 1)

    def as_json(self) -> dict[str, Any]:
        """For the run's folder and the report."""
        return {**asdict(self), "data": [path.name for path in self.data], "taps": self.taps and list(self.taps)}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run has made.

    Attributes:
        folder: of the head, with report.json and report.html. curve: its judgements.
    """

    folder: Path
    curve: Curve


def train(llm: LLM, config: TrainConfig, output: str | Path, *, command: str = "") -> Trained:
    """Train a head for a model; a run that was stopped goes on where it was.

    Args:
        llm: the model, in bfloat16 or float32, on a CPU or GPU.
        output: folder of the head; the run's own files are in its folder `run`.
        command: how it was asked for, for the report.
    Raises:
        ConfigError: the folder holds a run of other settings. PromptError: prompts that cannot be used.
        CapabilityError: a model that does not give what the method needs.
    """
    _check(llm)
    folder = Path(output)
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    _claim(run / SETTINGS, {"model": llm.runner.info.fingerprint, **config.as_json()})
    answers = _answers(llm, config, run)
    length = config.fitting.row_tokens
    training, held_out = split(answers, config.held_out_share, length)
    head, view = _begun(llm, config, training)
    curve = fit(head, view, (packed(training, length), packed(held_out, length)), config.fitting, run)
    facts = _facts(llm, config, answers, command)
    tensors = {name: one.to(llm.runner.info.dtype) for name, one in head.tensors().items()}
    write_head(
        folder, replace(head.config, provenance=facts, target=_target(llm)), {**tensors, **_ids(head.config, view)}
    )
    write_report(folder, config.as_json(), curve, facts)
    return Trained(folder, curve)


def split(answers: Sequence[Answer], share: float, length: int) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and those to judge by: of the prompts that come first by id, the greedy ones.

    Raises:
        ConfigError: nothing is left on one side.
    """
    ordered = sorted(answers, key=lambda one: one.id)
    greedy = [one for one in ordered if one.temperature == 0.0]
    apart = greedy[: max(1, round(share * len(answers)))]
    names = {one.id for one in apart}
    training = documents_of([one for one in answers if one.id not in names], length)
    held_out = documents_of(apart, length)
    rule = f"give texts of at least three tokens to learn within {length} tokens, on both sides of held_out_share"
    need(bool(training and held_out), "data", rule, f"{len(training)} to train on and {len(held_out)} held out")
    return training, held_out


def _answers(llm: LLM, config: TrainConfig, run: Path) -> list[Answer]:
    length = config.fitting.row_tokens
    if config.texts:
        return texts_of(llm, config.data, most=config.most_prompts, longest=length)
    prompts = prompts_of(llm, config.data, most=config.most_prompts, longest=length // 2)
    return answered(
        llm, prompts, run / "answers.jsonl", max_tokens=config.max_tokens, sampled_share=config.sampled_share
    )


def _begun(llm: LLM, config: TrainConfig, training: Sequence[Document]) -> tuple[HeadTrainer, TargetView]:
    info, kind = llm.runner.info, trainer(config.method)
    ends = [token for token in (llm.tokenizer.bos_id, llm.tokenizer.eos_id) if token is not None]
    vocabulary = draft_vocabulary(training, config.draft_vocab_size, info.vocab_size, ends)
    depths = {} if config.depths is None else {"depths": config.depths}
    made = kind.config_of(info, _layer(llm), len(vocabulary), config.depths or 4)
    if config.taps is not None:
        made = replace(made, taps=config.taps)
    torch.manual_seed(config.fitting.seed)
    view = TargetView(llm.runner, made.taps, vocabulary, keep_bytes=config.feature_cache_bytes)
    head = kind(made, view.rows, **depths)
    head.begin_with(view)
    return head, view


def _layer(llm: LLM) -> dict[str, Any]:
    """A layer like the target's own, of a Llama's form."""
    spec = llm.runner.spec  # type: ignore[attr-defined]
    own = {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": spec.max_context,
        "hidden_act": "silu",
    }
    return {key: own[key] for key in LAYER_KEYS if key in own}


def _ids(config: HeadConfig, view: TargetView) -> dict[str, torch.Tensor]:
    return {"draft_to_target": view.vocabulary} if config.draft_vocab_size < config.vocab_size else {}


def _target(llm: LLM) -> Mapping[str, str]:
    info = llm.runner.info
    return {
        "name": Path(info.name).name,
        "fingerprint": info.fingerprint,
        "tokenizer": llm.tokenizer.fingerprint(),
    }


def _facts(llm: LLM, config: TrainConfig, answers: Sequence[Answer], command: str) -> dict[str, Any]:
    """Where a head comes from."""
    from paceline.version import __version__

    data = sha256("".join(one.id for one in answers).encode()).hexdigest()
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "data": {
            "files": [path.name for path in config.data],
            "sha256": data,
            "texts": len(answers),
            "tokens": sum(len(one.answer) for one in answers),
        },
        "target": dict(_target(llm)),
        "threads": torch.get_num_threads(),
    }


def _claim(path: Path, settings: Mapping[str, Any]) -> None:
    """Reject a folder in which a run of other settings has begun."""
    if path.is_file() and (known := json.loads(path.read_text())) != settings:
        other = sorted(key for key in known if known[key] != settings.get(key))
        raise ConfigError(
            f"{str(path.parent)!r} holds a run with another {', '.join(other)}; name another output, or remove it"
        )
    path.write_text(json.dumps(settings, indent=2))


def _check(llm: LLM) -> None:
    runner = llm.runner
    for name in ("taps", "head", "input_embeddings"):
        if not getattr(runner.capabilities, name):
            raise CapabilityError(
                f"training needs {name} of the model, which {runner.info.name} does not give as it runs here; use a "
                "family that runs natively"
            )
