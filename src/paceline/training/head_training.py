"""`train`: from prompts to a head that drafts for a model, and a report of what it can do."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from paceline.checkpoints import RUN_FINISHED, RUN_SETTINGS
from paceline.errors import CapabilityError, ConfigError, PacelineError
from paceline.models import has_ability
from paceline.training.answers import Asked, TrainingText, answered
from paceline.training.batches import Document, TargetView, draft_vocabulary, pieces
from paceline.training.heads import Stage, Trainer, trainer
from paceline.training.loop import STATE, LearningCurve, fit
from paceline.training.optimizing import steps_of
from paceline.training.processes import accelerator
from paceline.training.report import write_report
from paceline.training.speed import measured
from paceline.training.splits import LEAST, TextSplit, split
from paceline.training.state_shards import StateShards
from paceline.training.train_config import TrainConfig
from paceline.training.trained import Trained
from paceline.utils import need, replacing

if TYPE_CHECKING:
    from paceline.engine import Prompt, ReadPrompt
    from paceline.llm import LLM

SPLIT: Final = "training, validation, test"
"""Parts of a run's texts. Earlier versions had two, so that what these runs have learned may be tested on."""

ANSWERS: Final = "answers.jsonl"
"""In a run's folder: what the model said."""

MADE: Final = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")
"""What a folder of a model, a head or an adapter holds."""

SHARDS: Final = "states"
"""In a run's folder: states of the model, while it lasts."""

ALIGNMENT: Final = "alignment"
"""The last stage, of runs with several: on the target's answers."""

TIMED: Final = 64
"""Most tokens of a timed answer."""


def train(llm: LLM, config: TrainConfig, output: str | Path, *, command: str = "", speed_prompts: int = 8) -> Trained:
    """Train a head for a model; a run that was stopped goes on where it was. Of several processes all call it; the
    first one makes the answers, writes and times. While it learns, Ctrl-C and SIGTERM wait until its state is on the
    disk.

    Args:
        llm: the model, in bfloat16 or float32, on a CPU or GPU.
        output: folder of the head; the run's own files are in its folder `run`.
        command: how it was asked for, for the report.
        speed_prompts: prompts of the test texts on which it is timed in the end, in turn with plain decoding; 0 for
            none.
    Raises:
        ConfigError: the folder holds a run of other settings, or of more or fewer processes, or what no run has made;
            too few texts.
        PromptError: prompts that cannot be used.
        CapabilityError: a model that does not give what the method needs.
    """
    _check(llm, config)
    folder, length = Path(output), config.fitting.row_tokens
    run = folder / "run"
    processes = accelerator()
    with processes.main_process_first():
        asked, stages = _asked(llm, config), trainer(config.method).stages(llm, config)
        new = _claim(folder, _settings(llm, config), command)
        with _left_free(run, new):
            answers = _answers(llm, config, asked, run / ANSWERS)
            texts = split(answers, config.held_out_share, length)
            head, view = _new_head(llm, config, texts.training)
    if config.feature_disk_bytes:
        with processes.main_process_first():
            every = [*texts.training, *texts.validation, *texts.test]
            view.shards = _shards(view, every, config, run, writes=processes.is_main_process)
    head.prepare(view, texts.training, length, config.fitting.seed)
    curves = [(stage.name, _learned(head, view, texts, stage, run)) for stage in stages]
    curve = fit(head, view, texts, config.fitting, run)
    if stages:
        curves.append((ALIGNMENT, curve))
    if view.shards is not None and config.feature_folder is None and processes.is_main_process:
        view.shards.remove()
    facts, speed = _facts(llm, config, answers, command), None
    if processes.is_main_process:
        head.write(folder, llm, view, facts)
        (folder / RUN_FINISHED).touch()
        if speed_prompts and head.drafts:
            prompts = head.timed_prompts(view, texts.test[:speed_prompts])
            speed = _timed(llm, head, folder, prompts, max_tokens=min(TIMED, config.max_tokens))
    before, test = curves[0][1].tests[0] if curves else curve.tests[0], curve.tests[1]
    model = folder if head.replaces_target else None
    trained = Trained(
        folder, test, before, curve, texts.sizes(), head.speculative_config(folder), model, speed,
        stages=curves, relative_size=head.relative_size(llm),
    )  # fmt: skip
    if processes.is_main_process:
        write_report(trained, config.as_json(), facts)
    processes.wait_for_everyone()
    return trained


def _learned(head: Trainer, view: TargetView, texts: TextSplit, stage: Stage, run: Path) -> LearningCurve:
    """Learn a stage's texts, which the target has nothing to do with, judged on those of the target's that are not
    learned; a stage that has ended is not gone through again.
    """
    folder = run / stage.name
    folder.mkdir(exist_ok=True)
    alone = TargetView(view.runner, None, view.vocabulary, keep_bytes=0)
    own = TextSplit(pieces(stage.texts, stage.fitting.row_tokens), texts.validation, texts.test)
    return fit(head, alone, own, stage.fitting, folder, phase=stage.name)


def _settings(llm: LLM, config: TrainConfig) -> dict[str, Any]:
    """All that a run's result depends on, by which a run is known again."""
    made_by = {"model": llm.runner.info.fingerprint, "processes": accelerator().num_processes}
    return {**made_by, **config.as_json(), "sha256": [_sum(path) for path in config.files()], "split": SPLIT}


def _timed(
    llm: LLM, head: Trainer, folder: Path, prompts: Sequence[Prompt | ReadPrompt], *, max_tokens: int
) -> dict[str, Any]:
    """What `measured` says of what was written into the folder."""
    target = replaced(llm, folder) if head.replaces_target else llm
    return measured(
        target, head.speculative_config(folder), prompts, depths=head.depths, max_tokens=max_tokens,
        ignore_eos=not head.reads_sources,
    )  # fmt: skip


def replaced(llm: LLM, folder: Path) -> LLM:
    """The model in a folder, run as another one is."""
    info = llm.runner.info
    return type(llm)(str(folder), dtype=str(info.dtype).removeprefix("torch."), device=str(info.device))


def _asked(llm: LLM, config: TrainConfig) -> list[TrainingText] | Asked:
    """Texts as they are, or prompts."""
    if config.texts:
        return trainer(config.method).texts(llm, config)
    prompts = trainer(config.method).prompts(llm, config)
    rule = f"hold {LEAST} prompts or more: one to learn, one to choose the best state by, one to test it on"
    need(len(prompts) >= LEAST, "data", rule, len(prompts))
    return prompts


def _answers(llm: LLM, config: TrainConfig, asked: list[TrainingText] | Asked, file: Path) -> list[TrainingText]:
    if isinstance(asked, list):
        return asked
    return answered(llm, asked, file, max_tokens=config.max_tokens, sampled_share=config.sampled_share)


def _new_head(llm: LLM, config: TrainConfig, training: Sequence[Document]) -> tuple[Trainer, TargetView]:
    ends = [token for token in (llm.tokenizer.bos_id, llm.tokenizer.eos_id) if token is not None]
    vocabulary = draft_vocabulary(training, config.draft_vocab_size, llm.runner.info.vocab_size, ends)
    torch.manual_seed(config.fitting.seed)
    return trainer(config.method).init(llm, config, vocabulary)


def _shards(
    view: TargetView, documents: Sequence[Document], config: TrainConfig, run: Path, *, writes: bool
) -> StateShards:
    """States of the documents, on disk before training begins; one process writes them, others read."""
    shared = config.feature_folder
    folder = run / SHARDS if shared is None else shared / view.identity()
    shards = StateShards(folder, config.feature_disk_bytes if writes else 0, view.parts)
    if writes:
        view.keep(documents, shards)
    return shards


def _target(llm: LLM) -> Mapping[str, str]:
    info = llm.runner.info
    return {
        "name": Path(info.name).name,
        "fingerprint": info.fingerprint,
        "tokenizer": llm.tokenizer.fingerprint(),
    }


def _facts(llm: LLM, config: TrainConfig, answers: Sequence[TrainingText], command: str) -> dict[str, Any]:
    """Where a head comes from."""
    from paceline.version import __version__

    data = sha256(json.dumps([(answer.id, answer.answer) for answer in answers]).encode()).hexdigest()
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "data": {
            "files": [path.name for path in config.files()],
            "sha256": data,
            "texts": len(answers),
            "tokens": sum(len(answer.answer) for answer in answers),
        },
        "target": dict(_target(llm)),
        "threads": torch.get_num_threads(),
        "device": _device(llm.runner.info.device),
    }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _claim(folder: Path, settings: Mapping[str, Any], command: str) -> bool:
    """Make a folder this run's, and say whether it was new.

    Raises:
        ConfigError: it holds a run of other settings, or a model or head that no run has made.
    """
    path = folder / RUN_SETTINGS
    need(folder.is_dir() or not folder.exists(), "output", "be a folder", str(folder))
    present = [name for name in MADE if (folder / name).exists()]
    if present and not path.exists():
        raise ConfigError(
            f"{str(folder)!r} holds {present[0]} and no {RUN_SETTINGS} to go on with; name another output"
        )
    known = {"split": "training, held out", **json.loads(path.read_text())} if path.is_file() else {}
    known.pop("command", None)
    now = json.loads(json.dumps(settings))
    known = {key: value for key, value in known.items() if key in now}  # earlier versions had settings of all methods
    if other := list(_differing(known, now)):
        raise ConfigError(
            f"{str(folder)!r} holds a run with another {', '.join(other)}; name another output, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_text(json.dumps({**now, "command": command}, indent=2))
    return not known


def standing(folder: Path) -> str:
    """How far the run in an output's folder is, as "step 12", or "" where there is nothing to go on from."""
    run = folder / RUN_SETTINGS.parent
    if (run / STATE).is_file():
        return f"step {steps_of(run / STATE)}"
    answers = (run / ANSWERS).read_bytes().count(b"\n") if (run / ANSWERS).is_file() else 0
    return f"{answers} answers" if answers else ""


@contextmanager
def _left_free(run: Path, new: bool) -> Iterator[None]:
    """A new run that is refused before anything was answered leaves nothing behind."""
    try:
        yield
    except PacelineError:
        if new and not (run / ANSWERS).exists():
            shutil.rmtree(run)
        raise


def _differing(known: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are others now, with both values where these are short; earlier versions had fewer."""
    for key in sorted(known):
        before, after = known[key], now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differing(before, after)
        elif before != after:
            named = "content of data" if key == "sha256" else key
            yield named if isinstance(before, list | dict) else f"{named} ({before}, now {after})"


def _sum(path: Path) -> str:
    """A digest of a file, or of all files in a folder."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        return sha256(json.dumps([_sum(file) for file in files]).encode()).hexdigest()
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _check(llm: LLM, config: TrainConfig) -> None:
    runner = llm.runner
    for name in ("taps", "head", "input_embeddings"):
        if not has_ability(runner, name):
            raise CapabilityError(
                f"training needs {name} of the model, which {runner.info.name} does not give as it runs here; use a "
                "family that runs natively"
            )
    method = trainer(config.method)
    if runner.info.source and not method.reads_sources:
        raise CapabilityError(
            f"{config.method} learns from texts alone, and {runner.info.name} writes from what its encoder reads; "
            "train encdec_draft for it"
        )
    config_class = method.config_class
    rule = f"be a {config_class.__name__} for method {config.method!r}"
    need(isinstance(config, config_class), "config", rule, type(config).__name__)
    method.check(runner.info, config)
