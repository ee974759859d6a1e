"""Folders, hub ids, the offline cache, and the formats that are rejected with an error that names them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import OLD, hub_cache, save_json

from paceline.checkpoints import read_config, resolve
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **OLD}


def fill(folder: Path, config: dict[str, Any] | None = None, weights: str = "model.safetensors") -> None:
    save_json(folder / "config.json", LLAMA if config is None else config)
    (folder / weights).write_bytes(b"")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="local folder"):
        resolve(tmp_path, revision="main")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/no/such/folder", "no folder '/no/such/folder'"),
        ("./nowhere", "no folder"),
        ("~/no-such-folder-here", "no folder"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("", "no folder ''"),
        ("model.safetensors", "no folder"),
        ("model.gguf", "no file 'model.gguf'"),
        ("/no/such/model.gguf", "no file '/no/such/model.gguf'"),
    ],
)
def test_no_such_folder(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        resolve(name)


@pytest.mark.parametrize("wrong", ["smol.ggu", "Smoll.gguf", "smol-q4.gguf"])
def test_a_name_that_is_nearly_right_gets_the_right_one(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "smol.gguf").write_bytes(b"")
    (tmp_path / "other.txt").write_bytes(b"")
    for ask in (lambda: resolve(tmp_path / wrong), lambda: resolve(tmp_path, gguf_file=wrong)):
        with pytest.raises(CheckpointError, match=r"did you mean '.*/smol\.gguf'\?$"):
            ask()
    with pytest.raises(CheckpointError) as far:
        resolve(tmp_path / "nothing-like-it")
    assert "did you mean" not in str(far.value)


def test_a_link_to_nothing_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf is a link to gone\.gguf, which is not there"):
        resolve(tmp_path / "m.gguf")


def test_files_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(tmp_path / "x.gguf") == resolve(tmp_path, gguf_file="x.gguf") == tmp_path / "x.gguf"
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match=r"holds no file 'y.gguf'; check gguf_file"):
        resolve(tmp_path, gguf_file="y.gguf")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "model.safetensors")


def test_a_hub_id_out_of_the_cache_while_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, "some-org/tiny", fill)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("some-org/tiny") == snapshot
    with pytest.raises(CheckpointError, match="no folder 'some-org/other', and some-org/other is not") as found:
        resolve("some-org/other")
    assert "HF_HUB_OFFLINE is set" in str(found.value)


def _response(status: int, **headers: str) -> Any:
    from huggingface_hub import errors

    library = import_module(errors.Response.__module__.partition(".")[0])  # httpx, or its successor
    request = library.Request("GET", "https://huggingface.co/api/models/a/b")
    return library.Response(status, headers=headers, request=request)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("GatedRepoError", "a/b is gated; accept its terms at https://huggingface.co/a/b and log in"),
        ("RepositoryNotFoundError", "no hub repository is called 'a/b'"),
        ("RevisionNotFoundError", "a/b has no revision 'v9'"),
        ("HfHubHTTPError", "cannot be downloaded"),
    ],
)
def test_what_the_hub_answers(error: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def rejects(*args: Any, **kwargs: Any) -> str:
        raise getattr(errors, error)("two\nlines", response=_response(404))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", rejects)
    with pytest.raises(CheckpointError, match=text) as caught:
        resolve("a/b", revision="v9")
    assert "\n" not in str(caught.value)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def rejects(*args: Any, **kwargs: Any) -> str:
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", rejects)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        resolve("a/b")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("https://huggingface.co/a/b", "write 'a/b'"),
        ("https://huggingface.co/a/b/tree/main", "write 'a/b'"),
        ("hf.co/a/b", "write 'a/b'"),
        ("hf://a/b", "write 'a/b'"),
        ("a/b-GGUF:Q4_K_M", "write 'a/b-GGUF', and the name of the GGUF file as gguf_file (--gguf-file)"),
        ("a/b/c", "check the path"),
        ("/a/b:c", "check the path"),
        ("https://elsewhere.org/a/b", "check the path"),
    ],
)
def test_addresses_as_other_tools_take_them(name: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    assert str(caught.value) == f"no folder {name!r}, and not a hub id, which reads 'org/name'; {hint}"


def test_gguf_files_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def gives(name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gives)
    parts = ["q/x-00001-of-00002.gguf", "q/x-00002-of-00002.gguf"]
    (tmp_path / "q").mkdir()
    for part in parts:
        (tmp_path / part).touch()
    assert resolve("a/b", gguf_file=parts[1]) == tmp_path / parts[0]
    assert asked == [("a/b", {"revision": None, "allow_patterns": parts})]
    with pytest.raises(CheckpointError, match=r"a/b holds no file 'y\.gguf'; check gguf_file"):
        resolve("a/b", gguf_file="y.gguf")


@pytest.mark.parametrize("code", [False, True])
def test_only_what_is_needed_is_asked_for(code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    seen: dict[str, Any] = {}

    def remember(name: str, **kwargs: Any) -> str:
        seen.update(kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", remember)
    assert resolve("a/b", code=code) == tmp_path
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "README.md",
        "x.gguf",
    ]
    patterns = {"allow_patterns": seen["allow_patterns"], "ignore_patterns": seen["ignore_patterns"]}
    kept = list(filter_repo_objects([*wanted, *unwanted, "modeling.py"], **patterns))
    assert kept == wanted + (["modeling.py"] if code else [])


def test_config_is_read(tmp_path: Path) -> None:
    fill(tmp_path)
    assert read_config(tmp_path) == LLAMA


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json in"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{half")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path)


QUANTISED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "format": "marlin"}}, "GPTQ"),
    ({"quantization_config": {"quant_method": "hqq"}}, "HQQ"),
    ({"quantization_config": {"load_in_4bit": True}}, "BITSANDBYTES"),
    ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "MXFP4"),
    (
        {"compression_config": {"quant_method": "compressed-tensors", "config_groups": {}, "format": "sparse-bitmask"}},
        "compressed-tensors",
    ),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
]


@pytest.mark.parametrize(("change", "text"), QUANTISED)
def test_configurations_that_are_rejected_by_name(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    fill(tmp_path, LLAMA | change)
    with pytest.raises(UnsupportedModelError, match=text) as caught:
        read_config(tmp_path)
    assert "; use " in str(caught.value)


def test_a_model_that_sees_is_taken_where_its_text_part_is_native(tmp_path: Path) -> None:
    """Ministral 3 and Mistral Small are published with their vision tower alone."""
    seeing = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {}}
    fill(tmp_path, seeing | {"text_config": {"model_type": "ministral3"}})
    assert read_config(tmp_path)["model_type"] == "mistral3"
    fill(tmp_path, seeing | {"text_config": {"model_type": "unheard_of"}})
    with pytest.raises(UnsupportedModelError, match="vision-language models are not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", ["gptq", [], False, 4])
def test_a_quantisation_that_is_no_object_is_rejected(key: str, value: object, tmp_path: Path) -> None:
    fill(tmp_path, LLAMA | {key: value})
    with pytest.raises(CheckpointError, match=f"'{key}' must be an object, got .*; use ") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
    fill(tmp_path, LLAMA | {key: None})
    assert read_config(tmp_path)[key] is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytorch_model.bin", "pickled.*convert"),
        ("pytorch_model-00001-of-00002.bin", "pickled"),
        ("adapter_config.json", "LoRA.*load org/base with lora="),
    ],
)
def test_files_that_are_rejected_by_name(file: str, text: str, tmp_path: Path) -> None:
    fill(tmp_path, weights="pytorch_model.bin" if "pytorch" not in file else file)
    if "pytorch" not in file:
        (tmp_path / "pytorch_model.bin").unlink()
    save_json(tmp_path / file, {"base_model_name_or_path": "org/base"})
    with pytest.raises(UnsupportedModelError, match=text):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_old_quantisation_files(file: str, tmp_path: Path) -> None:
    fill(tmp_path)
    save_json(tmp_path / file, {"bits": 9, "w_bit": 3, "quantization": {"quant_algo": "W4A8"}})
    with pytest.raises(UnsupportedModelError, match="are not supported; use a GGUF file"):
        read_config(tmp_path)
