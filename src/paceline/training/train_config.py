"""What is asked of a training run: the method, its data, how long."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from paceline.utils import choice, integer, need, number

METHODS: Final = {
    "eagle": "eagle:EagleTrainer",
    "eagle3": "eagle3:Eagle3Trainer",
    "medusa": "medusa:MedusaTrainer",
    "medusa2": "medusa2:Medusa2Trainer",
    "hydra": "hydra:HydraTrainer",
    "hydra++": "hydra:HydraPlusTrainer",
    "mlp_speculator": "mlp_speculator:MLPSpeculatorTrainer",
    "draft_model": "draft_model:DraftModelTrainer",
    "kangaroo": "kangaroo:KangarooTrainer",
    "layer_skip": "layer_skip:LayerSkipTrainer",
    "lora": "lora:LoraTrainer",
    "codebooks": "codebooks:CodebookTrainer",
}
"""Method -> module and class of its `Trainer`."""

OWN: Final = {
    "rank": ("lora",),
    "alpha": ("lora",),
    "target_modules": ("lora",),
    "codebook_size": ("codebooks",),
    "codes": ("codebooks",),
    "sites": ("codebooks",),
    "layers": ("draft_model",),
    "hidden_size": ("draft_model",),
    "num_layers": ("draft_model",),
    "exit_layer": ("kangaroo", "layer_skip"),
}
"""Settings of some methods alone."""

LEARN_TEXTS: Final = ("lora", "codebooks")
"""Methods that learn texts as they are, not what the model says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """How long and how a head is trained.

    Attributes:
        minutes: of training, judging included; or steps, where these are given.
        batch_rows, row_tokens: rows of a step, tokens of a row.
        learning_rate: peak; None is the method's. warmup_steps, weight_decay, max_grad_norm: as usual.
        eval_steps: steps between two judgements, by which the best state is chosen.
        patience: judgements without a better one, after which training ends.
        bf16: products are computed in bfloat16, weights and their averages in float32; None: where that is faster here.
        seed: of the order of rows and of noise.
    """

    minutes: float = 20.0
    steps: int | None = None
    batch_rows: int = 4
    row_tokens: int = 512
    learning_rate: float | None = None
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    eval_steps: int = 100
    patience: int = 8
    bf16: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        number("minutes", self.minutes, 0.0, 1e6, "be above 0 and at most 1e6", open_low=True)
        if self.steps is not None:
            integer("steps", self.steps, 1)
        if self.learning_rate is not None:
            number("learning_rate", self.learning_rate, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
        number("weight_decay", self.weight_decay, 0.0, 1.0, "be in 0..1")
        number("max_grad_norm", self.max_grad_norm, 0.0, 1e6, "be above 0", open_low=True)
        integer("warmup_steps", self.warmup_steps, 0)
        integer("batch_rows", self.batch_rows, 1)
        integer("row_tokens", self.row_tokens, 16)
        integer("eval_steps", self.eval_steps, 1)
        integer("patience", self.patience, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train, and on what.

    Attributes:
        method: one of METHODS.
        data: files of prompts in the formats of `paceline bench`. texts: they are learned as they are, of
            conversations that end with an answer only that; otherwise the model answers first, and only its answers
            are learned.
        most_prompts: of each file. max_tokens: of an answer. sampled_share: of answers that are drawn at temperature
            0.8. held_out_share: of prompts, of each of two parts that are not learned and answered greedily: one
            chooses the best state, the other tests it; of few prompts they are larger (`training.splits`).
        draft_vocab_size: tokens that the head can draft, those that are written most often; kangaroo and layer_skip can
            draft all.
        depths: tokens ahead; None is the method's.
        taps: layers whose states are read, where the method reads several; None is the method's.
        layers: of the model, of which draft_model is made, ascending; None is a fifth of them.
        hidden_size, num_layers: of a small Llama that draft_model is instead; hidden_size is a multiple of 64.
        exit_layer: layers that run before kangaroo's adapter, or that draft by layer_skip; None is 2, or a quarter.
        rank, alpha: of a LoRA adapter, whose changes count alpha / rank times. target_modules: matrices that it
            changes, as "q_proj"; None is all of the layers'.
        codebook_size, codes, sites: codes of a codebook, how many of them make a state, and behind which modules of
            every layer there is one (`paceline.codebooks.SITES`).
        feature_cache_bytes: memory for states that are kept between epochs, where they are not on disk.
        feature_disk_bytes: space on disk for states, which are then computed before training begins, outside its
            minutes; what is beyond is computed on the way. feature_folder: where, of a folder that stays and serves all
            runs with the same model; None is one in the run's own folder, freed in the end.
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
    layers: tuple[int, ...] | None = None
    hidden_size: int | None = None
    num_layers: int = 1
    exit_layer: int | None = None
    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | None = None
    codebook_size: int = 1024
    codes: int = 8
    sites: tuple[str, ...] = ("attention", "mlp")
    feature_cache_bytes: int = 2 << 30
    feature_disk_bytes: int = 0
    feature_folder: Path | None = None
    fitting: Fitting = field(default_factory=Fitting)

    def __post_init__(self) -> None:
        choice("method", self.method, tuple(METHODS))
        need(bool(self.data), "data", "name at least one file", self.data)
        integer("max_tokens", self.max_tokens, 4)
        number("sampled_share", self.sampled_share, 0.0, 1.0, "be in 0..1")
        number("held_out_share", self.held_out_share, 0.0, 0.4, "be above 0 and at most 0.4", open_low=True)
        integer("draft_vocab_size", self.draft_vocab_size, 16)
        if self.depths is not None:
            integer("depths", self.depths, 1, 16)
        given = self.texts or self.method not in LEARN_TEXTS
        need(given, "texts", f"be true for {self.method}, which learns texts as they are", self.texts)
        integer("rank", self.rank, 1, 1024)
        integer("codebook_size", self.codebook_size, 2, 1 << 16)
        integer("codes", self.codes, 1, self.codebook_size)
        number("alpha", self.alpha, 0.0, 1e6, "be above 0", open_low=True)
        self._check_layers()
        self._check_shape()
        integer("feature_cache_bytes", self.feature_cache_bytes, 0)
        integer("feature_disk_bytes", self.feature_disk_bytes, 0)
        sized = self.feature_folder is None or self.feature_disk_bytes > 0
        need(sized, "feature_folder", "come with feature_disk_bytes (--feature-disk-gib)", self.feature_folder)
        self._check_own()

    def _check_own(self) -> None:
        """Settings of some methods alone are as they come for all others."""
        usual = {one.name: one.default for one in fields(self)}
        for name, methods in OWN.items():
            fine = self.method in methods or getattr(self, name) == usual[name]
            need(fine, name, f"be left out but for {' and '.join(methods)}", getattr(self, name))

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        for layer in self.layers:
            integer("layers", layer, 0)
        ascending = len(self.layers) > 0 and list(self.layers) == sorted(set(self.layers))
        need(ascending, "layers", "be one number or more, ascending", self.layers)

    def _check_shape(self) -> None:
        integer("num_layers", self.num_layers, 1, 64)
        if self.exit_layer is not None:
            integer("exit_layer", self.exit_layer, 1)
        if self.hidden_size is not None:
            need(self.layers is None, "hidden_size", "be left out where layers are given", self.hidden_size)
            need(self.hidden_size > 0 and self.hidden_size % 64 == 0, "hidden_size", "be a multiple of 64",
                 self.hidden_size)  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """For the run's folder and the report."""
        kept = {key: value for key, value in asdict(self).items() if key != "feature_folder"}
        return {**kept, "data": [path.name for path in self.data], "taps": self.taps and list(self.taps)}
