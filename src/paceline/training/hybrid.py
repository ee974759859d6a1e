"""Training of a hybrid out of a Llama: most layers get a Mamba-2 mixer in place of their attention.

What is trained are the mixers alone; embedding, norms, MLPs, head and the attention that is kept stay as they are. Each
mixer begins as the attention that it replaces (`mamba2_mixer`). First each is to give what its attention gives to the
same states, all at once and layer by layer; then all together are to say what the model says, on the same texts. What
is written is a checkpoint of Granite 4's hybrid family, which holds a Llama's layers exactly.

Sources: MOHAWK, Transformers to SSMs (arXiv:2408.10189), whose second and third stages these two are; The Mamba in the
Llama (arXiv:2408.15237); LoLCATs (arXiv:2410.10254), for learning the first by what attention gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoints import Checkpoint, read_config
from paceline.config import documented, option
from paceline.errors import CapabilityError
from paceline.training.batches import PAD, Batch, Document, TargetView, packed
from paceline.training.draft_model import LAYER, check_layers, embedding_of, sliced, write_checkpoint
from paceline.training.heads import SoftTargets
from paceline.training.loop import bf16_is_faster
from paceline.training.mamba2_mixer import TrainableMamba2
from paceline.training.next_token import NextTokenTrainer, decoded
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo, ModelSpec

TAPS: Final = 4
"""Of the mixers' convolutions."""

EVERY: Final = 4
"""By default the last of so many layers keeps its attention."""

TAKEN: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
    "dtype", "torch_dtype",
)  # fmt: skip
"""Keys of a Llama's config.json that say the same in the hybrid's."""

SEEN: Final = 12_288
"""Tokens from which the maps behind mixers are found before the first step."""

RIDGE: Final = 1e-2
"""Of least squares, as a share of the inputs' mean square."""

Tensors = dict[str, Tensor]
Watch = Callable[[TrainableMamba2, Tensor, Tensor, Tensor], None]


@documented
@dataclass(frozen=True, kw_only=True)
class HybridConfig(TrainConfig):
    """Says which layers keep their attention, and how much of a run goes into matching each mixer by itself."""

    attention_layers: tuple[int, ...] | None = option(
        None, "Layers that keep their attention, for hybrid: 3,7,11; every fourth by default.", check=check_layers
    )
    matching_share: float = option(
        0.1, "Of a run of hybrid, in which each mixer learns what its attention gives.", low=0.0, high=1.0,
        rule="be in 0..1",
    )  # fmt: skip


class HybridTrainer(NextTokenTrainer):
    """Makes a hybrid of a Llama, with a Mamba-2 mixer in place of the attention of most layers.

    Args:
        folder: of the target's checkpoint. spec: of it. kept: layers that keep their attention.
        rows: (v, hidden) of its head, for the whole vocabulary. matching_share: see `HybridConfig`.
    Raises:
        CapabilityError: layers that are not those of a Llama.
    """

    name: ClassVar[str] = "hybrid"
    config_class: ClassVar[type[TrainConfig]] = HybridConfig
    rate: ClassVar[float] = 3e-4
    drafts: ClassVar[bool] = False
    replaces_target: ClassVar[bool] = True

    def __init__(
        self, folder: Path, spec: ModelSpec, kept: Sequence[int], rows: Tensor, *, matching_share: float
    ) -> None:
        super().__init__(rows, 1)
        _check_llama(spec)
        self.spec, self.kept, self.matching_share = spec, tuple(kept), matching_share
        model, self.embed = sliced(folder, range(spec.num_layers))
        self.model = (model.requires_grad_(False),)  # in a tuple: no part of what is trained and kept
        self.how = PassKind()
        self.mixers = nn.ModuleDict()
        for index, layer in enumerate(cast(nn.ModuleList, model.layers)):
            if index not in self.kept:
                mixer = _mixer_of(layer, spec)
                layer.self_attn = Replaced(cast(nn.Module, layer.self_attn), mixer, self.how)
                self.mixers[str(index)] = mixer

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, HybridConfig)
        count, kept = target.num_layers, config.attention_layers
        need(max(kept or (0,)) < count, "attention_layers", f"be below {count}, the model's layers", kept)
        need(len(kept or ()) < count, "attention_layers", "leave a layer for a mixer", kept)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[HybridTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, HybridConfig)
        info, spec = llm.runner.info, llm.runner.spec  # type: ignore[attr-defined]
        kept = config.attention_layers or range(EVERY - 1, info.num_layers, EVERY)
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=0)
        return cls(llm.folder, spec, kept, view.rows, matching_share=config.matching_share), view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        return f"paceline generate -m {folder}"

    @torch.no_grad()
    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """The map behind each mixer becomes the one that comes nearest to what attention gives to some texts."""
        self.to(self.rows.device)
        mixers = cast("list[TrainableMamba2]", list(self.mixers.values()))
        sums = {mixer: LeastSquares(mixer.out_proj) for mixer in mixers}
        rows, fast = packed(documents, length), bf16_is_faster(self.rows.device)
        for row in rows[:: max(1, len(rows) * length // SEEN)]:
            batch = view.batch([row], length).to(self.rows.device)
            real = _real(batch)

            def add(
                mixer: TrainableMamba2, x: Tensor, positions: Tensor, attended: Tensor, real: Tensor = real
            ) -> None:
                sums[mixer].add(*(part.flatten(0, 1)[real] for part in (mixer.read(x, positions), attended)))

            with torch.autocast(self.rows.device.type, torch.bfloat16, enabled=fast):
                self._run(batch, mixed=False, watch=add)
        for one in sums.values():
            one.solve()

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        return self.misfit(batch) if self.done < self.matching_share else self.cross_entropy(batch)

    def misfit(self, batch: Batch) -> Tensor:
        """How far mixers are from the attention that they replace, on the model's own states: the mean over layers of
        squared distances, as shares of the squares of what attention gives.
        """
        real, found = _real(batch), list[Tensor]()

        def compare(mixer: TrainableMamba2, x: Tensor, positions: Tensor, attended: Tensor) -> None:
            found.append(distance(mixer(x, positions), attended, real))

        self._run(batch, mixed=False, watch=compare)
        return torch.stack(found).mean()

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Of the model's next token, in nats, behind every token of the texts."""
        real = _real(batch)
        with torch.no_grad():
            chances = self.logits(self._run(batch, mixed=False)[real]).softmax(-1, dtype=torch.float32)
        row = torch.full((batch.tokens.numel(),), -1, device=real.device)
        row[real] = torch.arange(len(real), device=real.device)
        states = self._run(batch, mixed=True)[real]
        return SoftTargets(row, chances).loss(states, self.rows, real) / max(1, len(real))

    def states(self, batch: Batch) -> Tensor:
        return self._run(batch, mixed=True).view(*batch.tokens.shape, -1)

    def _run(self, batch: Batch, *, mixed: bool, watch: Watch | None = None) -> Tensor:
        """(b * t, d) states behind the final norm, of the hybrid or of the model; see `PassKind`."""
        self.how.mixed, self.how.watch = mixed, watch
        model = self.model[0].to(batch.tokens.device)
        return decoded(model, embedding_of(self.embed, batch), batch).flatten(0, 1)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint of Granite 4's hybrid family, with the target's tokenizer."""
        config = hybrid_config(read_config(llm.folder), self.spec, self.kept)
        write_checkpoint(folder, llm, config | {"paceline_hybrid": dict(facts)}, self._tensors(llm.folder))

    def _tensors(self, folder: Path) -> Tensors:
        """The checkpoint's own, but for the attention that is replaced, and those of the mixers."""
        stored, tensors = Checkpoint(folder), Tensors()
        for name in stored.entries:
            part = LAYER.fullmatch(name)
            if part is None or int(part[1]) in self.kept or not part[2].startswith("self_attn."):
                tensors[name] = stored.tensor(name)
        for index in range(self.spec.num_layers):
            layer = f"model.layers.{index}."
            gate, up, down = (tensors.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
            tensors[f"{layer}shared_mlp.input_linear.weight"] = torch.cat([gate, up])
            tensors[f"{layer}shared_mlp.output_linear.weight"] = down
        for index_name, mixer in self.mixers.items():
            own = mixer.named_parameters()
            tensors |= {f"model.layers.{index_name}.mamba.{name}": weight for name, weight in own}
        return tensors


@dataclass(slots=True)
class PassKind:
    """What the replaced layers do in a pass.

    Attributes:
        mixed: layers go on with what mixers give; otherwise with what attention gives.
        watch: is told, where they go on with attention: the mixer, the states that both read, and their positions in
            documents, and what attention gives.
    """

    mixed: bool = True
    watch: Watch | None = None


class LeastSquares:
    """Finds the weight and bias of a linear map that bring its outputs nearest to others."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, size = linear, linear.in_features + 1
        device = linear.weight.device
        self._squares = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._products = torch.zeros(size, linear.out_features, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        """Of (m, inputs) and (m, outputs)."""
        with torch.autocast(inputs.device.type, enabled=False):
            extended = F.pad(inputs.float(), (0, 1), value=1.0)
            self._squares += extended.T @ extended
            self._products += extended.T @ wanted.float()

    def solve(self) -> None:
        """Set the map; with a small ridge, since inputs may depend on each other."""
        ridge = RIDGE * self._squares.diagonal().mean() * torch.eye(len(self._squares)).to(self._squares)
        found = torch.linalg.solve(self._squares + ridge, self._products)
        self.linear.weight.copy_(found[:-1].T)
        self.linear.bias.copy_(found[-1])


class Replaced(nn.Module):
    """Stands where a layer of transformers has its attention.

    Args:
        attention: that was there. mixer: that takes its place. how: what is to be done, shared by all layers.
    """

    def __init__(self, attention: nn.Module, mixer: TrainableMamba2, how: PassKind) -> None:
        super().__init__()
        self.attention, self.mixer, self.how = attention, mixer, how

    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **more: Any) -> tuple[Tensor, None]:
        if self.how.mixed:
            return self.mixer(hidden_states, position_ids).to(hidden_states.dtype), None
        attended = self.attention(hidden_states=hidden_states, position_ids=position_ids, **more)[0]
        if self.how.watch is not None:
            self.how.watch(self.mixer, hidden_states, position_ids, attended)
        return attended, None


def distance(mixed: Tensor, attended: Tensor, real: Tensor) -> Tensor:
    """The squared distance of what a mixer gives from what attention gives, both (b, t, d), at flat places `real`
    (m,), as a share of the latter's square.
    """
    made, wanted = (states.flatten(0, 1)[real].float() for states in (mixed, attended))
    return (made - wanted).square().sum() / wanted.square().sum()


def hybrid_config(llama: Mapping[str, Any], spec: ModelSpec, kept: Sequence[int]) -> dict[str, Any]:
    """The config.json of a hybrid in which layers `kept` have a Llama's attention, and the others a mixer."""
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        **{key: llama[key] for key in TAKEN if key in llama},
        "attention_bias": False,
        "attention_multiplier": spec.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": spec.intermediate_size,
        "position_embedding_type": "rope",
        "layer_types": ["attention" if index in kept else "mamba" for index in range(spec.num_layers)],
        "mamba_n_heads": spec.num_heads,
        "mamba_n_groups": spec.num_heads,
        "mamba_d_head": spec.head_dim,
        "mamba_d_state": spec.head_dim,
        "mamba_d_conv": TAPS,
        "mamba_expand": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
    }


def _real(batch: Batch) -> Tensor:
    """(m,) int64 flat places that hold a token."""
    return (batch.documents != PAD).flatten().nonzero().squeeze(1)


def _check_llama(spec: ModelSpec) -> None:
    biased = spec.qkv_bias or spec.o_bias or spec.mlp_bias
    if spec.family != "llama" or biased or spec.num_heads * spec.head_dim != spec.hidden_size:
        raise CapabilityError(
            f"a hybrid is made of a Llama without biases whose heads make up its hidden size, not of {spec.family} "
            f"with {spec.num_heads} heads of {spec.head_dim} and a hidden size of {spec.hidden_size}"
        )


def _mixer_of(layer: nn.Module, spec: ModelSpec) -> TrainableMamba2:
    """The mixer that begins as a layer's attention."""
    mixer = TrainableMamba2(spec.hidden_size, spec.num_heads, taps=TAPS, eps=spec.norm_eps)
    attention, norm = cast(Any, layer.self_attn), cast(Any, layer.input_layernorm)
    maps = tuple(getattr(attention, f"{name}_proj").weight for name in "qkvo")
    mixer.begin_as(cast("tuple[Tensor, Tensor, Tensor, Tensor]", maps), norm.weight)
    return mixer
