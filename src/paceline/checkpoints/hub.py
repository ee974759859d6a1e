"""From what a user calls a model, a folder or a hub id, to a local folder that may be loaded; other formats are
rejected with an error that names them.

Downloads go through huggingface_hub, which keeps its cache, honours HF_HUB_OFFLINE, HF_HOME and HF_TOKEN, and is asked
only for configuration, safetensors, tokenizer and generation files at the top of the repository, and for the
configuration of an encoder's modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.checkpoint import INDEX, SINGLE
from paceline.checkpoints.encoder_decoder_families import ENCODER_DECODER_FAMILIES
from paceline.checkpoints.families import has_native_text
from paceline.checkpoints.gguf_file import SPLIT, is_gguf, split_names
from paceline.checkpoints.gguf_metadata import gguf_config
from paceline.checkpoints.marian_checkpoint import marian_config
from paceline.checkpoints.marian_file import marian_path
from paceline.checkpoints.quantized_formats import find_format
from paceline.checkpoints.tokenizer import read_json
from paceline.checkpoints.unfinished import refuse_unfinished
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.utils import near_file, need, one_line

DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
NOT_DOWNLOADED = ("*/*", "consolidated*.safetensors", "README*", "LICENSE*")
BUNDLED_FOLDER = Path(__file__).parents[1] / "bundled"
BUNDLED_PREFIX = "bundled/"
"""Models that ship with the package: `bundled/target`, `bundled/diffusion`, `bundled/block_diffusion`, ..."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HEADLESS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForRewardModel",
    "ForMaskedLM",
)
"""Endings of architectures that hold no language-modelling head."""

CONDITIONAL = "ForConditionalGeneration"
"""Ending of architectures that mostly read more than the text before."""

GGUF_FILE = "gguf_file (--gguf-file)"
"""The argument in Python, and the flag: errors are read in both places."""


def check_names(**names: object) -> None:
    """Reject what names no model, tokenizer or revision.

    Raises:
        ConfigError: a value that is neither a text nor a path, nor None; a revision that is no text.
    """
    for key, value in names.items():
        kinds, rule = ((str,), "a branch, tag or commit") if key == "revision" else ((str, Path), "a folder or hub id")
        need(value is None or isinstance(value, kinds), key, f"be {rule}", value)


def resolve(
    model: str | Path, *, revision: str | None = None, code: bool = False, gguf_file: str | None = None
) -> Path:
    """The local folder or GGUF file of a model, downloaded if it is a hub id that is not in the cache.

    Args:
        model: a folder, a GGUF file, "bundled/NAME" for a model that ships with the package, or a hub id such as
            "org/name".
        revision: branch, tag or commit on the hub.
        code: fetch Python files too (for `trust_remote_code`).
        gguf_file: the file meant in a folder or repository that holds GGUF files; of a split one any part.
    Raises:
        CheckpointError: no such folder, file or repository, gated, or offline and not in the cache; a training that
            has not finished.
        ConfigError: a revision of a local folder.
    """
    name = str(model)
    try:
        path = Path(name).expanduser()
        is_folder = bool(name) and path.is_dir()
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such home
        raise CheckpointError(
            f"{name[:200]!r} cannot be opened ({getattr(error, 'strerror', None) or error}); check the path"
        ) from error
    refuse_unfinished(path.parent if path.name == "head" and not is_folder else path)
    if is_folder:
        if revision is not None:
            raise ConfigError(f"revision={revision!r} applies to hub ids, but {name!r} is a local folder; leave it out")
        return _gguf_in(path, gguf_file) or path
    if name.startswith(BUNDLED_PREFIX):
        return _bundled(name, revision)
    if path.is_file() and is_gguf(path):
        return path
    if path.is_file():
        raise CheckpointError(f"{name} is a file; give the folder of a checkpoint, with config.json and safetensors")
    if path.is_symlink():
        raise CheckpointError(f"{name} is a link to {path.readlink()}, which is not there; check the path")
    if name.endswith(".gguf") and (gguf_file is None and (path.parent.is_dir() or name.count("/") != 1)):
        raise CheckpointError(f"no file {name!r}; check the path{near_file(path)}")
    if not HUB_ID.fullmatch(name) or name.endswith((".safetensors", ".bin")):
        raise CheckpointError(
            f"no folder {name!r}, and not a hub id, which reads 'org/name'; {_instead_of(name)}{near_file(path)}"
        )
    return _download(name, revision, code) if gguf_file is None else _download_gguf(name, revision, gguf_file)


def _instead_of(name: str) -> str:
    """What to write where a name is neither folder nor hub id: other tools take addresses, and files behind a colon."""
    bare = re.sub(r"^(https?://(huggingface\.co|hf\.co)|hf:/|hf\.co)/", "", name)
    repository = re.match(r"[\w.-]+/[\w.-]+", bare)
    if bare != name and repository is not None:
        return f"write {repository[0]!r}"
    if repository is not None and repository.end() < len(name) and name[repository.end()] == ":":
        return f"write {repository[0]!r}, and the name of the GGUF file as {GGUF_FILE}"
    return "check the path"


def _gguf_in(folder: Path, wanted: str | None) -> Path | None:
    """The GGUF file of a folder: the one wanted, else the only one where there are no other weights; or None."""
    if wanted is not None:
        if not (folder / wanted).is_file():
            near = near_file(folder / wanted)
            raise CheckpointError(f"{folder} holds no file {wanted!r}; check {GGUF_FILE}{near}")
        return folder / wanted
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return None
    files = [
        file for file in sorted(folder.glob("*.gguf")) if (m := SPLIT.match(file.name)) is None or int(m["part"]) == 1
    ]
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(files)} GGUF files; name one with {GGUF_FILE}: "
            f"{', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


def _bundled(name: str, revision: str | None) -> Path:
    """The folder of a model that ships with the package."""
    there = sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))
    if name.removeprefix(BUNDLED_PREFIX) not in there:
        known = " or ".join(BUNDLED_PREFIX + bundled for bundled in there)
        raise CheckpointError(f"no model called {name!r} ships with this package; name {known}")
    if revision is not None:
        raise ConfigError(
            f"revision={revision!r} applies to hub ids, but {name!r} ships with this package; leave it out"
        )
    return BUNDLED_FOLDER / name.removeprefix(BUNDLED_PREFIX)


def _download(name: str, revision: str | None, code: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [*DOWNLOADED, *(["*.py"] if code else [])]
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=list(NOT_DOWNLOADED))
        )
    except Exception as error:  # HTTP, cache and validation errors of several libraries
        raise _explain(error, name, revision) from error


def resolve_encoder(model: str | Path) -> Path:
    """The local folder of an encoder, as `resolve` gives it, with the `config.json` of each module that
    sentence-transformers keeps in a folder of its own (1_Pooling).

    Raises:
        CheckpointError, ConfigError: as `resolve`.
    """
    folder = resolve(model)
    if folder.is_dir() and not Path(model).expanduser().is_dir() and not str(model).startswith(BUNDLED_PREFIX):
        _download_modules(str(model))
    return folder


def _download_modules(name: str) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, allow_patterns=["[0-9]_*/config.json"])
    except Exception as error:  # HTTP, cache and validation errors of several libraries
        raise _explain(error, name, None) from error


def _download_gguf(name: str, revision: str | None, file: str) -> Path:
    from huggingface_hub import snapshot_download

    parts = split_names(file)
    try:  # the whole list at once: file by file, huggingface_hub tries again and again where there is no network
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=parts))
    except Exception as error:  # HTTP, cache and validation errors of several libraries
        raise _explain(error, name, revision) from error
    if absent := [part for part in parts if not (folder / part).is_file()]:
        raise CheckpointError(f"{name} holds no file {absent[0]!r}; check {GGUF_FILE}")
    return folder / parts[0]


def _explain(error: Exception, name: str, revision: str | None) -> CheckpointError:
    """One line for what went wrong on the way to the hub."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{name} is gated; accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{name} has no revision {revision!r} on the hub; check the branch, tag or commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"no folder and no hub repository is called {name!r}; check the name, or log in with `hf auth login` if "
            f"it is private{near_file(Path(name))}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        wanted = name if revision is None else f"{name} at revision {revision!r}"
        if constants.HF_HUB_OFFLINE:
            return CheckpointError(
                f"no folder {name!r}, and {wanted} is not (or not whole) in the cache {constants.HF_HUB_CACHE} while "
                f"HF_HUB_OFFLINE is set; unset it to download{near_file(Path(name))}"
            )
        return CheckpointError(
            f"no folder {name!r}, and the hub cannot be reached to download {wanted}; check the name and the connection"
            f"{near_file(Path(name))}"
        )
    return CheckpointError(f"{name} cannot be downloaded ({one_line(error)}); check the name and the connection")


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint folder, or what a GGUF file or one of Marian's says instead, after rejecting
    what cannot be loaded from this folder.

    Raises:
        CheckpointError: no config.json, or not readable.
        UnsupportedModelError: adapters, pickled weights, quantised ones in a format that is not read, models that read
            more than text, or that do not write text.
    """
    if is_gguf(folder):
        return gguf_config(folder)
    if (marian := marian_path(folder)) is not None:
        return marian_config(marian)
    _refuse_formats(folder)
    config = read_json(folder / "config.json")
    if not config:
        if (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}/config.json is empty; download the checkpoint again")
        refuse_unfinished(folder)
        raise CheckpointError(
            f"no config.json in {folder}; give the folder of a whole Hugging Face checkpoint, or for GGUF files "
            f"the name of one as {GGUF_FILE}"
        )
    _refuse_kinds(folder, config)
    find_format(folder, config)
    headless = [name for name in _architectures(config) if name.endswith(HEADLESS)]
    if headless:
        raise UnsupportedModelError(
            f"{folder} is a {headless[0]}, which does not write text; use a ForCausalLM checkpoint"
        )
    return config


def _refuse_formats(folder: Path) -> None:
    weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    if (folder / "adapter_config.json").is_file() and not weights:
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise UnsupportedModelError(
            f"{folder} holds a LoRA or other adapter, no model; load {base} with lora={str(folder)!r} (--lora FOLDER)"
        )
    if weights:
        return
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        raise UnsupportedModelError(
            f"{folder} holds pickled weights only, which may run code and are not supported; convert them to "
            "safetensors (load them with transformers and save_pretrained)"
        )


def _refuse_kinds(folder: Path, config: Mapping[str, Any]) -> None:
    """Reject models that read more than text or speech."""
    if has_source(config):
        return
    family, kinds = str(config.get("model_type")), "encoder-decoder models of this kind"
    if config.get("is_encoder_decoder") is not True:
        kinds = _other_input(config, family)
    if kinds:
        rather = "a decoder-only (ForCausalLM) one" if kinds.startswith("encoder") else "a model of text alone"
        raise UnsupportedModelError(f"{folder} ({family}): {kinds} are not supported yet; use {rather}")


def has_source(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes a model with an encoder for text or speech, native or of transformers."""
    family = str(config.get("model_type"))
    if family in ENCODER_DECODER_FAMILIES:
        return True
    conditional = any(name.endswith(CONDITIONAL) for name in _architectures(config))
    if not (config.get("is_encoder_decoder") is True or conditional):
        return False
    from transformers.models.auto import modeling_auto as known

    return family in {
        **known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }


def _other_input(config: Mapping[str, Any], family: str) -> str:
    """What a model that reads more than the text before is, in words; "" where that is all that it needs."""
    conditional = any(name.endswith(CONDITIONAL) for name in _architectures(config))
    seeing = isinstance(config.get("vision_config"), Mapping)
    if not (seeing or conditional) or "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return ""
    if has_native_text(config):
        return ""
    from transformers.models.auto import modeling_auto as known

    if family in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    return "vision-language models" if seeing or family in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else ""


def _architectures(config: Mapping[str, Any]) -> list[str]:
    architectures = config.get("architectures")
    return [str(name) for name in architectures] if isinstance(architectures, list) else []
