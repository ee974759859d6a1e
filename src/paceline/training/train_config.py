"""What is asked of a training run: the method, its data, how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline import registry
from paceline.config import REQUIRED, check_options, documented, option
from paceline.utils import need


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Says how long a head is trained, and how: rows, rates, judgements."""

    minutes: float = option(
        20.0, "Time for training, answers not counted.", low=0.0, high=1e6, rule="be above 0 and at most 1e6",
        open_low=True,
    )  # fmt: skip
    steps: int | None = option(None, "Steps, in place of minutes.", low=1)
    batch_rows: int = option(4, "Rows of a step.", low=1)
    row_tokens: int = option(512, "Longest text, and tokens of a packed row.", low=16)
    learning_rate: float | None = option(
        None, "Peak; the method's by default.", low=0.0, high=1.0, rule="be above 0 and at most 1", open_low=True
    )
    warmup_steps: int = option(50, doc="Over which the learning rate rises.", low=0)
    weight_decay: float = option(0.01, doc="Of AdamW.", low=0.0, high=1.0, rule="be in 0..1")
    max_grad_norm: float = option(0.5, doc="Gradients are cut to it.", low=0.0, high=1e6, rule="be above 0",
                                  open_low=True)  # fmt: skip
    eval_steps: int = option(100, "Steps between two judgements, which choose the best state.", low=1)
    patience: int = option(8, doc="Judgements without a better one, after which training ends.", low=1)
    bf16: bool | None = option(None, doc="Products in bfloat16, weights in float32; None: where that is faster here.")
    seed: int = option(0, doc="Of the order of rows and of noise.")

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Says what to train, and on what. Methods with settings of their own have a class that derives from it
    (`Trainer.config_class`).

    Raises:
        ConfigError: a value outside its range.
    """

    method: str = option(
        REQUIRED, doc="A name of the registry of trainers, or module:Class.",
        check=lambda name, value: registry.lookup("trainers", value),
    )  # fmt: skip
    data: Sequence[Path] = option(
        REQUIRED, "Prompts, as `paceline bench` reads them; repeatable.",
        check=lambda name, value: need(bool(value), name, "name at least one file", value),
    )  # fmt: skip
    texts: bool = option(
        False, "Learn the files' texts as they are, without answers of the model.",
        doc="Learn the files' texts as they are, of conversations that end with an answer only that.",
    )  # fmt: skip
    most_prompts: int | None = option(None, "Prompts taken from each file; all by default.", low=2)
    max_tokens: int = option(256, "Tokens of an answer.", low=4)
    sampled_share: float = option(0.25, "Answers drawn at temperature 0.8.", low=0.0, high=1.0, rule="be in 0..1")
    held_out_share: float = option(
        0.05, low=0.0, high=0.4, rule="be above 0 and at most 0.4", open_low=True,
        doc="Of prompts, for each of two parts that are not learned and answered greedily: one chooses the best state, "
        "the other tests it; of few prompts they are larger (`training.splits`).",
    )  # fmt: skip
    draft_vocab_size: int = option(8192, "Tokens that the head can draft.", low=16)
    depths: int | None = option(None, "Tokens ahead; the method's number by default.", low=1, high=16)
    taps: tuple[int, ...] | None = option(
        None, doc="Layers whose states are read, where the method reads several; None is the method's."
    )
    feature_cache_bytes: int = option(
        2 << 30, "Memory for the model's states.", flag="feature_cache_gib", unit=2**30, low=0
    )
    feature_disk_bytes: int = option(
        0, "Space on disk for them: computed before training begins.", flag="feature_disk_gib", unit=2**30, low=0
    )
    feature_folder: Path | None = option(
        None, "Where on disk, for all runs with the same model.", metavar="FOLDER",
        doc="Where on disk, for all runs with the same model; None is one in the run's own folder, freed in the end.",
    )  # fmt: skip
    fitting: Fitting = field(default_factory=Fitting)

    def __post_init__(self) -> None:
        check_options(self)
        sized = self.feature_folder is None or self.feature_disk_bytes > 0
        need(sized, "feature_folder", "come with feature_disk_bytes (--feature-disk-gib)", self.feature_folder)

    def files(self) -> list[Path]:
        """All that is learned from."""
        return list(self.data)

    def as_json(self) -> dict[str, Any]:
        """For the run's folder and the report."""
        return {key: _plain(value) for key, value in asdict(self).items() if key != "feature_folder"}


def _plain(value: Any) -> Any:
    """A setting as JSON has it, of files their names."""
    if isinstance(value, tuple | list):
        return [each.name if isinstance(each, Path) else each for each in value]
    return value


@documented
@dataclass(frozen=True, kw_only=True)
class TextTrainConfig(TrainConfig):
    """Configures methods that learn texts as they are, not what the model says."""

    texts: bool = option(True, "Learn the files' texts as they are, without answers of the model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"be true for {self.method}, which learns texts as they are"
        need(self.texts, "texts", rule, self.texts)


@documented
@dataclass(frozen=True, kw_only=True)
class ExitConfig(TrainConfig):
    """Configures methods that draft with the model's first layers."""

    exit_layer: int | None = option(None, "Layers that draft, for kangaroo (2) and layer_skip (a quarter).", low=1)
