"""Quantised safetensors checkpoints: every element against a reader of single elements, whole models, damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.quantized_files import (
    AwqLayout,
    Fp4Layout,
    Fp8Layout,
    GptqLayout,
    Int8Layout,
    Layout,
    PackLayout,
    packed,
    quantized_model,
    save,
    shards,
)
from safetensors.torch import load_file, save_file
from tiny_checkpoint import edit_json
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from paceline.checkpoints import NAMES, QuantizedCheckpoint, block_values, find_format, quantize_rows, read_config
from paceline.checkpoints.quantized_formats import awq, scaled_floats
from paceline.checkpoints.quantized_formats import compressed_tensors as compressed
from paceline.checkpoints.quantized_formats.bit_streams import unpacked_numbers
from paceline.checkpoints.quantized_formats.matrix_blocks import block_form
from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.models import load_runner

OUTPUTS, INPUTS = 32, 96
TOKENS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()

LAYOUTS: dict[str, Layout] = {
    **{f"gptq-{bits}": GptqLayout(bits, act_order=bits in {3, 4}) for bits in (2, 3, 4, 8)},
    "gptq-v2": GptqLayout(4, v2=True),
    "gptq-whole": GptqLayout(4, -1, symmetric=True),
    "awq": AwqLayout(),
    "pack-4": PackLayout(4),
    "pack-8-channel": PackLayout(8, None),
    "pack-4-zeros-order": PackLayout(4, zeros=True, act_order=True),
    "int8": Int8Layout(),
    "fp8-block": Fp8Layout(),
    "fp8-ragged": Fp8Layout((40, 36)),
    "fp8-channel": Fp8Layout((0, 0)),
    "nvfp4": Fp4Layout(),
    "nvfp4-modelopt": Fp4Layout("modelopt"),
    "mxfp4": Fp4Layout("mxfp4"),
}


def opened(folder: Path, layout: Layout, parts: dict[str, torch.Tensor], **changes: Any) -> QuantizedCheckpoint:
    save(folder, {f"a.{part}": tensor for part, tensor in parts.items()})
    form = find_format(folder, {"quantization_config": layout.settings | changes})
    assert form is not None
    return QuantizedCheckpoint(folder, form)


def test_words_as_published_readers_cut_them() -> None:
    word = torch.tensor([[0x76543210], [0x62951413]], dtype=torch.int32)
    assert unpacked_numbers(word, 4, 8).tolist() == [list(range(8)), [3, 1, 4, 1, 5, 9, 2, 6]]
    three = torch.tensor([[0x43C67543, 0x7543C675, 0xC67543C6 - 2**32]], dtype=torch.int32)
    assert unpacked_numbers(three, 3, 32).tolist() == [[(5 * i + 3) % 8 for i in range(32)]]
    signed = torch.tensor([[0xA95BF870 - 2**32]], dtype=torch.int32)
    assert (unpacked_numbers(signed, 4, 8).int() - 8).tolist() == [[-8, -1, 0, 7, 3, -3, 1, 2]]
    (turned,) = awq.in_order(torch.tensor([[0x69112543]], dtype=torch.int32)).T.tolist()
    assert turned == [3, 1, 4, 1, 5, 9, 2, 6]
    for bits in range(2, 9):
        numbers = torch.randint(0, 1 << bits, (3, 50), generator=torch.Generator().manual_seed(bits))
        assert torch.equal(unpacked_numbers(packed(numbers, bits), bits, 50).long(), numbers)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_that_of_the_formula(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    parts, meant = layout.write(OUTPUTS, INPUTS, 5)
    checkpoint = opened(tmp_path, layout, parts)
    found, wanted = checkpoint.tensor("a.weight").double(), layout.values(parts, OUTPUTS, INPUTS)
    assert (wanted - meant).abs().max() <= 1e-12
    assert checkpoint.entries.keys() == {"a.weight"}
    assert (found - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()
    half = torch.empty(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    checkpoint.fill("a.weight", half)
    assert torch.equal(half, found.float().bfloat16())
    assert (layout.write(OUTPUTS, INPUTS, 6)[1] - wanted).norm() > 0.5 * wanted.norm()


def swapped(pairs: torch.Tensor) -> torch.Tensor:
    return (pairs >> 4) | (pairs << 4)


def without(name: str) -> Any:
    return lambda parts: {key: value for key, value in parts.items() if key != name}


WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "groups in order": ("gptq-4", without("g_idx"), {}),
    "zeros as they are": ("gptq-4", dict, {"checkpoint_format": "gptq_v2"}),
    "one more than zeros": ("gptq-v2", dict, {"checkpoint_format": "gptq"}),
    "outputs in order": ("awq", dict, {"places": tuple(range(8))}),
    "groups of packed numbers in order": ("pack-4-zeros-order", without("weight_g_idx"), {}),
    "no zeros": ("pack-4-zeros-order", without("weight_zero_point"), {}),
    "scales divide": ("fp8-block", lambda parts: parts | {"weight_scale_inv": 1 / parts["weight_scale_inv"]}, {}),
    "the high half first": ("nvfp4", lambda parts: parts | {"weight_packed": swapped(parts["weight_packed"])}, {}),
    "the scale of all multiplies": (
        "nvfp4", lambda parts: parts | {"weight_global_scale": 1 / parts["weight_global_scale"]}, {}
    ),
    "powers above 128": ("mxfp4", dict, {"bias": 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reading_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, change, settings = WRONG[name]
    layout = LAYOUTS[case]
    parts = layout.write(OUTPUTS, INPUTS, 5)[0]
    if "places" in settings:
        monkeypatch.setattr(awq, "PLACES", settings.pop("places"))
    if "bias" in settings:
        monkeypatch.setattr(scaled_floats, "BIAS", settings.pop("bias"))
    found = opened(tmp_path, layout, change(parts), **settings).tensor("a.weight").double()
    wanted = layout.values(parts, OUTPUTS, INPUTS)
    assert (found - wanted).norm() > 0.05 * wanted.norm()


def test_an_offset_that_is_forgotten_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["pack-4"]
    parts = layout.write(OUTPUTS, INPUTS, 5)[0]
    zeros = compressed.PackedIntegers.zeros
    monkeypatch.setattr(compressed.PackedIntegers, "zeros", lambda *given: zeros(*given) * 0)
    found = opened(tmp_path, layout, parts).tensor("a.weight")
    assert (found.double() - layout.values(parts, OUTPUTS, INPUTS)).abs().min() > 0


def test_zeros_of_version_2_under_the_name_of_version_1_are_known_by_their_value(tmp_path: Path) -> None:
    layout = GptqLayout(4, symmetric=True, v2=True)
    parts = layout.write(OUTPUTS, INPUTS, 5)[0]
    wanted = layout.values(parts, OUTPUTS, INPUTS)
    found = opened(tmp_path, layout, parts, checkpoint_format="gptq")
    assert (found.tensor("a.weight").double() - wanted).abs().max() < 1e-6
    uneven = opened(tmp_path, layout, parts, checkpoint_format="gptq", sym=False)
    assert (uneven.tensor("a.weight").double() - wanted).abs().min() > 1e-3


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gptq-4", ("INT4_ZEROS",)), ("gptq-3", ("INT4_ZEROS",)), ("gptq-whole", ("Q4_0", "INT4_ZEROS", "Q8_0")),
        ("gptq-8", ()), ("awq", ("INT4_ZEROS",)), ("pack-4", ("Q4_0", "INT4_ZEROS", "Q8_0")),
        ("pack-4-zeros-order", ("INT4_ZEROS",)), ("pack-8-channel", ("Q8_0",)), ("int8", ("Q8_0",)),
        ("nvfp4", ("FP4_HALVES",)), ("mxfp4", ("MXFP4",)),
    ],
)  # fmt: skip
def test_blocks_hold_the_numbers_of_the_file(name: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Whose values are those of the file bit for bit, in an order that has the inputs of a group side by side."""
    checkpoint = opened(tmp_path, LAYOUTS[name], LAYOUTS[name].write(OUTPUTS, INPUTS, 5)[0])
    form, wanted = block_form(checkpoint.matrices["a.weight"], checkpoint.stored_tensor), checkpoint.tensor("a.weight")
    assert form is not None
    assert form.kinds == kinds
    order = form.order
    assert (order is None) == (name not in {"gptq-3", "gptq-4", "pack-4-zeros-order"})
    for kind in kinds:
        assert kind in NAMES
        found = block_values(torch.from_numpy(form.make(kind, 0)), kind).view(OUTPUTS, INPUTS)
        ordered = wanted if order is None else wanted[:, torch.from_numpy(order)]
        assert (found - ordered).abs().max() <= (2.0**-11 if name == "nvfp4" else 0) * wanted.abs().max()
        if order is not None:
            assert not torch.equal(found, wanted)


def test_groups_that_no_block_has_are_not_kept(tmp_path: Path) -> None:
    """Of 24 inputs, and of columns in an order that leaves a group 31."""
    for layout, name in ((GptqLayout(4, 24), "g_idx"), (PackLayout(4, zeros=True, act_order=True), "weight_g_idx")):
        parts = layout.write(OUTPUTS, INPUTS, 5)[0]
        if name == "weight_g_idx":
            parts[name][int((parts[name] == 0).nonzero()[0])] = 1
        checkpoint = opened(tmp_path / name, layout, parts)
        form = block_form(checkpoint.matrices["a.weight"], checkpoint.stored_tensor)
        assert form is not None
        assert form.kinds == ()


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2} | more
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, head_dim=32, initializer_range=0.1, **sizes)
    return LlamaForCausalLM(config).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=128, num_hidden_layers=2, head_dim=32, num_local_experts=4, **sizes)
    return checkpoints.perturb(MixtralForCausalLM(config).eval())


def logits(path: Path, **how: Any) -> torch.Tensor:
    runner: Any = load_runner(path, dtype="float32", **how)
    found: torch.Tensor = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    return found


def oracle(model: Any, meant: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of transformers' model with the weights that a file stands for."""
    model.load_state_dict(model.state_dict() | meant)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def rounded(folder: Path) -> Path:
    """Make float matrices of a folder multiples of a scale for each output, so that int8 keeps them."""
    tensors = load_file(folder / "model.safetensors")
    floats = [name for name in tensors if tensors[name].dtype is torch.float32]
    for name in [name for name in floats if name.endswith(("_proj.weight", "lm_head.weight"))]:
        whole, scale = quantize_rows(tensors[name])
        tensors[name] = whole * scale[:, None]
    save_file(tensors, folder / "model.safetensors")
    return folder


KEPT = ["gptq-4", "gptq-whole", "awq", "pack-4-zeros-order", "int8", "nvfp4", "mxfp4"]


@pytest.mark.parametrize("name", [*KEPT, "gptq-8", "fp8-block"])
def test_models_answer_as_their_multiplied_out_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the values of the file; in compiled passes but for the rounding of activations, and where that is said."""
    model = llama()
    folder, meant = quantized_model(tmp_path / "m", model, LAYOUTS[name])
    meant["lm_head.weight"] = load_file(rounded(folder) / "model.safetensors")["lm_head.weight"]
    exact = oracle(model, meant)
    assert (logits(folder, quantization="none") - exact).norm() < 1e-4 * exact.norm()
    assert "rounded" not in caplog.text
    runner: Any = load_runner(folder, dtype="float32", activation_bits=16 if name in KEPT else None)
    assert runner.info.quantization == ("blocks" if name in KEPT else "int8")
    found = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    assert (found - exact).norm() < (1e-3 if name in KEPT else 0.03) * exact.norm()
    (line,) = [one for one in caplog.messages if "rounded" in one]
    assert ("keep their numbers, but for the head, rounded to int8" if name in KEPT else "are rounded to int8") in line
    other = oracle(model, {key: value.roll(1, 1) for key, value in meant.items()})
    assert (found - other).norm() > 0.3 * exact.norm()


@pytest.mark.parametrize("maps", ["self_attn.q_proj", ""])
def test_gates_of_attention_are_kept_or_rounded_with_the_queries_that_they_lie_beside(
    maps: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where keys and values are floats in the file."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_key_value_heads": 1}
    config = Qwen3_5TextConfig(vocab_size=128, **sizes, **layers)
    model = Qwen3_5ForCausalLM(config).float().eval()
    folder, _ = quantized_model(tmp_path, model, lambda name: LAYOUTS["awq"] if maps in name else None)
    exact, found = logits(folder, quantization="none"), logits(folder, activation_bits=16)
    assert ("keep their numbers" in caplog.text) == (not maps)
    assert (found - exact).norm() < 0.03 * exact.norm()
    assert (found.roll(1, 0) - exact).norm() > 0.3 * exact.norm()


def test_columns_of_heads_and_of_inner_activations_find_their_inputs(tmp_path: Path) -> None:
    """Act-order in every map, with more query heads than keys; a model that ignores it answers otherwise."""
    model = llama(num_attention_heads=8)
    folder, meant = quantized_model(tmp_path / "m", model, LAYOUTS["gptq-4"])
    exact = oracle(model, meant)
    assert (logits(folder, activation_bits=16) - exact).norm() < 0.01 * exact.norm()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].sort().values
    save_file(tensors, folder / "model.safetensors")
    assert (logits(folder, activation_bits=16) - exact).norm() > 0.3 * exact.norm()


def test_maps_that_are_not_quantised_or_of_several_orders_are_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    order = GptqLayout(4, act_order=True)

    def layout(name: str) -> Layout | None:
        return None if "0.mlp.down" in name else order if "1.self_attn.k_proj" in name else GptqLayout(4)

    folder, meant = quantized_model(tmp_path / "m", model, layout)
    exact = oracle(model, meant)
    found = logits(folder, activation_bits=16)
    assert "but for the head and 2 matrices of the layers, rounded to int4, and to int8 where" in caplog.text
    assert (found - exact).norm() < 0.03 * exact.norm()


def test_shards_hold_parts_of_a_map_and_files_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.checkpoints.packed_files.LEAST", 1)
    folder, _ = quantized_model(tmp_path / "m", llama(), LAYOUTS["awq"])
    first = logits(folder)
    assert len(list(shards(folder))) == 2
    assert torch.equal(logits(folder), first)
    monkeypatch.setattr(awq.AwqMatrix, "numbers", None)  # nothing is unpacked again
    assert torch.equal(logits(folder), first)
    edit_json(folder / "config.json", quantization_config=LAYOUTS["awq"].settings | {"changed": True})
    with pytest.raises(TypeError):
        logits(folder)


DAMAGED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "no scales": ("gptq-4", without("scales"), {}, r"lacks a\.scales; download"),
    "scales of other groups": ("gptq-4", lambda parts: parts | {"scales": parts["scales"][:2]}, {}, "asks? for"),
    "other bits": ("gptq-4", dict, {"bits": 8}, "which 8 bits do not make"),
    "other groups": ("gptq-4", dict, {"group_size": 16}, "groups of 16 make 6"),
    "a group that is not there": ("gptq-4", lambda parts: parts | {"g_idx": parts["g_idx"] + 1}, {}, "group 3 of 3"),
    "zeros of another shape": ("awq", lambda parts: parts | {"qzeros": parts["qzeros"][:, :2]}, {}, "has shape"),
    "floats for words": ("awq", lambda parts: parts | {"qweight": parts["qweight"].float()}, {}, "must be I32"),
    "a wrong shape": ("pack-4", lambda parts: parts | {"weight_shape": torch.tensor([32, 999])}, {}, "do not make"),
    "no scale": ("int8", lambda parts: parts | {"weight_scale": parts["weight_scale"][:3]}, {}, "has shape"),
    "blocks of other sizes": ("fp8-block", dict, {"weight_block_size": [16, 16]}, "has shape"),
    "no scale of all": ("nvfp4", lambda parts: parts | {"weight_global_scale": torch.zeros(1)}, {}, "is 0.0"),
    "nothing quantised": ("gptq-4", lambda parts: {"weight": torch.ones(3, 3)}, {}, r"tensor that ends in \.qweight"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_clear_line(name: str, tmp_path: Path) -> None:
    case, change, settings, text = DAMAGED[name]
    with pytest.raises(CheckpointError, match=text) as caught:
        opened(tmp_path, LAYOUTS[case], change(LAYOUTS[case].write(OUTPUTS, INPUTS, 5)[0]), **settings).tensor(
            "a.weight"
        )
    assert "\n" not in str(caught.value)


SETTINGS: list[tuple[dict[str, Any], type[PacelineError], str]] = [
    ({"quant_method": "gptq"}, CheckpointError, "'bits' must be a whole number"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, UnsupportedModelError, "'marlin'"),
    ({"quant_method": "gptq", "bits": 9}, UnsupportedModelError, "9 bits"),
    ({"quant_method": "awq", "version": "gemv"}, UnsupportedModelError, "'gemv'"),
    ({"quant_method": "fp8", "weight_block_size": 5}, CheckpointError, "two whole numbers"),
    ({"quant_method": "compressed-tensors"}, CheckpointError, "config_groups"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, UnsupportedModelError,
     "marlin-24"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8"}, UnsupportedModelError, "W4A8"),
    ({"load_in_4bit": True}, UnsupportedModelError, r"BITSANDBYTES.*use a GGUF file"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "kind", "text"), SETTINGS)
def test_settings_that_are_not_read(
    settings: dict[str, Any], kind: type[PacelineError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text) as caught:
        find_format(tmp_path, {"quantization_config": settings})
    assert "\n" not in str(caught.value)


def test_settings_of_older_tools_lie_beside_the_configuration(tmp_path: Path) -> None:
    folder, _ = quantized_model(tmp_path / "m", llama(), LAYOUTS["gptq-4"])
    wanted = logits(folder)
    edit_json(folder / "config.json", quantization_config=None)
    settings = {key: value for key, value in LAYOUTS["gptq-4"].settings.items() if key != "quant_method"}
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    assert read_config(folder)["model_type"] == "llama"
    assert torch.equal(logits(folder), wanted)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = quantized_model(tmp_path / "m", llama(), LAYOUTS["awq"])
    with pytest.raises(UnsupportedModelError, match=r"is quantised \(AWQ\), which the native runner alone reads"):
        load_runner(folder, native=False)


def test_experts_of_gpt_oss_are_kept_in_stacks_of_mxfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = (checkpoints.write("gpt_oss-wide", "module", tmp_path / kind) for kind in ("packed", "plain"))
    checkpoints.pack_experts(packed, plain)
    exact = logits(rounded(plain), quantization="none")
    assert (logits(rounded(packed), quantization="none") - exact).norm() < 1e-4 * exact.norm()
    assert "rounded" not in caplog.text
    runner: Any = load_runner(packed, dtype="float32", activation_bits=16)
    assert "MXFP4" in runner.info.fingerprint
    found = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    assert (found - exact).norm() < 1e-3 * exact.norm()
    assert "(MXFP4, 4 bits) keep their numbers, but for the head and 6 matrices" in caplog.text
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1] += 1
    save_file(tensors, packed / "model.safetensors")
    assert (logits(packed, activation_bits=16) - exact).norm() > 0.01 * exact.norm()


def test_experts_that_are_quantised_one_by_one_are_kept(tmp_path: Path) -> None:
    folder, _ = quantized_model(tmp_path / "m", mixtral(), AwqLayout())
    exact = logits(rounded(folder), quantization="none")
    runner: Any = load_runner(folder, dtype="float32", activation_bits=16)
    assert runner.info.quantization == "blocks"
    found = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    assert (found - exact).norm() < 1e-3 * exact.norm()
    assert (found - exact.roll(1, 0)).norm() > 0.3 * exact.norm()
