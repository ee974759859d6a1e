"""Quantised checkpoints written by plain formulas, and readers of one element at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
MAPS = re.compile(r"layers\..*(_proj|\.w[123])\.weight$")
"""Names of the maps that are quantised."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words_of(numbers: list[int], bits: int) -> list[int]:
    """Signed 32-bit words of numbers that follow each other, the lowest bits first."""
    stream = sum(number << (bits * place) for place, number in enumerate(numbers))
    words = [(stream >> (32 * place)) & 0xFFFFFFFF for place in range(-(-len(numbers) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, words) int32 of (rows, numbers)."""
    return torch.tensor([words_of(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def bits_at(words: list[int], start: int, count: int) -> int:
    """The number whose lowest bit is bit `start` of a stream of words."""
    return sum(((words[at // 32] >> (at % 32)) & 1) << place for place, at in enumerate(range(start, start + count)))


def draw(shape: tuple[int, ...], most: int, seed: int, least: int = 0) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(shape: tuple[int, ...], seed: int, size: float = 0.02) -> torch.Tensor:
    return (size * (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)))).half()


class Layout:
    """A format as a test writes it.

    Attributes:
        settings: its `quantization_config`.
    """

    settings: dict[str, Any]

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        """Parts of a random matrix, and the weights that they were made of."""
        raise NotImplementedError

    def element(self, parts: Tensors, output: int, index: int) -> float:
        """One weight by its formula, float64."""
        raise NotImplementedError

    def values(self, parts: Tensors, outputs: int, inputs: int) -> torch.Tensor:
        return torch.tensor(
            [[self.element(parts, output, index) for index in range(inputs)] for output in range(outputs)],
            dtype=torch.float64,
        )


class GptqLayout(Layout):
    def __init__(
        self, bits: int = 4, size: int = 32, *, act_order: bool = False, symmetric: bool = False, v2: bool = False
    ) -> None:
        self.bits, self.size, self.act_order, self.symmetric, self.v2 = bits, size, act_order, symmetric, v2
        self.settings = {
            "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
        }  # fmt: skip

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        groups, top = -(-inputs // (self.size if self.size > 0 else inputs)), (1 << self.bits) - 1
        zeros = draw((groups, outputs), top, seed + 1)
        if self.symmetric:
            zeros[:] = (1 << (self.bits - 1)) - (0 if self.v2 else 1)
        order = torch.arange(inputs) // (self.size if self.size > 0 else inputs)
        if self.act_order:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
        numbers, scales = (
            draw((outputs, inputs), top, seed),
            scales_of((groups, outputs), seed + 2, 0.32 / (1 << self.bits)),
        )
        parts = {
            "qweight": packed(numbers, self.bits).T.contiguous(), "qzeros": packed(zeros, self.bits),
            "scales": scales, "g_idx": order.int(),
        }  # fmt: skip
        zeros = zeros + (0 if self.v2 else 1)
        return parts, scales.double()[order].T * (numbers - zeros[order].T)

    def element(self, parts: Tensors, output: int, index: int) -> float:
        number = bits_at(parts["qweight"][:, output].tolist(), self.bits * index, self.bits)
        group = int(parts["g_idx"][index])
        zero = bits_at(parts["qzeros"][group].tolist(), self.bits * output, self.bits) + (0 if self.v2 else 1)
        return float(parts["scales"][group, output].double()) * (number - zero)


class AwqLayout(Layout):
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    columns = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self.settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        groups = inputs // self.size
        numbers, zeros = draw((inputs, outputs), 15, seed), draw((groups, outputs), 15, seed + 1)
        scales, order = scales_of((groups, outputs), seed + 2), torch.arange(inputs) // self.size
        words = [packed(part.view(-1, 8)[:, list(self.columns)].view(len(part), -1), 4) for part in (numbers, zeros)]
        parts = {"qweight": words[0], "qzeros": words[1], "scales": scales}
        return parts, (scales.double()[order] * (numbers - zeros[order])).T

    def element(self, parts: Tensors, output: int, index: int) -> float:
        start, group = 32 * (output // 8) + 4 * self.order[output % 8], index // self.size
        number = bits_at(parts["qweight"][index].tolist(), start, 4)
        zero = bits_at(parts["qzeros"][group].tolist(), start, 4)
        return float(parts["scales"][group, output].double()) * (number - zero)


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed"}  # fmt: skip


class PackLayout(Layout):
    """compressed-tensors' numbers in words."""

    def __init__(self, bits: int = 4, size: int | None = 32, *, zeros: bool = False, act_order: bool = False) -> None:
        self.bits, self.size, self.zeros, self.act_order, self.half = bits, size, zeros, act_order, 1 << (bits - 1)
        self.settings = compressed("pack-quantized", num_bits=bits, type="int", group_size=size)

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        groups, top = 1 if self.size is None else inputs // self.size, 2 * self.half - 1
        numbers, zeros = draw((outputs, inputs), top, seed), draw((outputs, groups), top, seed + 1)
        scales = scales_of((outputs, groups), seed + 2, 0.32 / (1 << self.bits)).bfloat16()
        order = torch.arange(inputs) // (self.size or inputs)
        parts = {
            "weight_packed": packed(numbers, self.bits), "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }  # fmt: skip
        if self.zeros:
            parts["weight_zero_point"] = packed(zeros.T, self.bits).T.contiguous()
        else:
            zeros[:] = self.half
        if self.act_order:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
            parts["weight_g_idx"] = order.int()
        return parts, scales.double()[:, order] * (numbers - zeros[:, order])

    def element(self, parts: Tensors, output: int, index: int) -> float:
        group = 0 if self.size is None else index // self.size
        if "weight_g_idx" in parts:
            group = int(parts["weight_g_idx"][index])
        number = bits_at(parts["weight_packed"][output].tolist(), self.bits * index, self.bits) - self.half
        zero = 0
        if "weight_zero_point" in parts:
            words = parts["weight_zero_point"][:, group].tolist()
            zero = bits_at(words, self.bits * output, self.bits) - self.half
        return float(parts["weight_scale"][output, group].double()) * (number - zero)


class Int8Layout(Layout):
    """compressed-tensors' bytes with a scale for each output."""

    def __init__(self) -> None:
        self.settings = compressed("int-quantized", num_bits=8, type="int", strategy="channel")

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        numbers, scales = draw((outputs, inputs), 127, seed, -128), scales_of((outputs, 1), seed + 2, 0.002)
        return {"weight": numbers.to(torch.int8), "weight_scale": scales}, scales.double() * numbers

    def element(self, parts: Tensors, output: int, index: int) -> float:
        return float(parts["weight_scale"][output, 0].double()) * int(parts["weight"][output, index])


class Fp8Layout(Layout):
    """Scales of blocks as DeepSeek stores them; with (0, 0), one for each output as compressed-tensors does."""

    def __init__(self, block: tuple[int, int] = (32, 32)) -> None:
        self.block = block
        self.settings = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
        if block == (0, 0):
            self.settings = compressed("float-quantized", num_bits=8, type="float", strategy="channel")

    @property
    def scale(self) -> str:
        return "weight_scale" if self.block == (0, 0) else "weight_scale_inv"

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weight = (100 * torch.randn(outputs, inputs, generator=generator)).to(torch.float8_e4m3fn)
        high, wide = self.block if self.block != (0, 0) else (1, inputs)
        scales = scales_of((-(-outputs // high), -(-inputs // wide)), seed + 1, 0.001).float()
        spread = scales.double().repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        return {"weight": weight, self.scale: scales}, weight.double() * spread

    def element(self, parts: Tensors, output: int, index: int) -> float:
        high, wide = self.block if self.block != (0, 0) else (1, 1 << 20)
        scale = parts[self.scale][output // high, index // wide]
        return float(parts["weight"][output, index].double()) * float(scale.double())


class Fp4Layout(Layout):
    """NVFP4 of compressed-tensors or ModelOpt, and MXFP4 of compressed-tensors."""

    def __init__(self, kind: str = "nvfp4") -> None:
        self.kind, self.group = kind, 32 if kind == "mxfp4" else 16
        self.settings = compressed(f"{kind}-pack-quantized", num_bits=4, type="float", group_size=self.group)
        self.packed, self.whole = "weight_packed", "weight_global_scale"
        if kind == "modelopt":
            self.settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
            self.packed, self.whole = "weight", "weight_scale_2"

    def write(self, outputs: int, inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        codes, shape = draw((outputs, inputs), 15, seed), (outputs, inputs // self.group)
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)]).double()[codes]
        parts = {self.packed: (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        if self.kind == "mxfp4":
            powers = draw(shape, 123, seed + 1, 120)
            parts["weight_scale"], scales = powers.to(torch.uint8), 2.0 ** (powers.double() - 127)
        else:
            whole = torch.tensor([3e-4 if self.kind == "modelopt" else 3000.0])
            small = 20 + 200 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))
            parts["weight_scale"], parts[self.whole] = small.to(torch.float8_e4m3fn), whole
            scales = parts["weight_scale"].double() * (whole if self.kind == "modelopt" else 1 / whole.double())
        return parts, numbers * scales.repeat_interleave(self.group, 1)

    def element(self, parts: Tensors, output: int, index: int) -> float:
        code = (int(parts[self.packed][output, index // 2]) >> (4 * (index % 2))) & 15
        number = E2M1[code & 7] * (-1.0 if code & 8 else 1.0)
        scale = parts["weight_scale"][output, index // self.group]
        if self.kind == "mxfp4":
            return float(number * 2.0 ** (int(scale) - 127))
        whole = float(parts[self.whole].double())
        return float(number * float(scale.double()) * (whole if self.kind == "modelopt" else 1 / whole))


def save(folder: Path, tensors: Tensors, settings: Mapping[str, Any] | None = None, name: str = "model") -> Path:
    """Write tensors, and the settings into `config.json`."""
    folder.mkdir(exist_ok=True, parents=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    if settings is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def quantized_model(folder: Path, model: Any, layout: Layout | Callable[[str], Layout | None]) -> tuple[Path, Tensors]:
    """Write a transformers model with random quantised maps in its layers.

    Args:
        layout: of all, or by the map's name.
    Returns:
        The folder, and the float weights that the maps stand for.
    """
    model.save_pretrained(folder)
    state, stored, meant = load_file(folder / "model.safetensors"), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    settings: dict[str, Any] = {}
    for seed, (name, weight) in enumerate(state.items()):
        form = (layout(name) if callable(layout) else layout) if MAPS.search(name) else None
        if form is None:
            stored[name] = weight.clone()
            continue
        (parts, weights), settings = form.write(*weight.shape, 10 * seed), form.settings
        meant[name] = weights.float()
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    return save(folder, stored, settings), meant


def shards(folder: Path) -> Iterator[Path]:
    """Cut a folder's file in two, so that parts of most maps lie in both."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for number in (0, 1):
        own = {name: tensors[name] for name in names[number::2]}
        path = folder / f"model-0000{number + 1}-of-00002.safetensors"
        save_file(own, path)
        where |= dict.fromkeys(own, path.name)
        yield path
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
