"""Whether plain and accelerated decoding of a loaded model give the same bits: requested, tested, stored on disk.

The finding belongs to the model's shape, the form of its passes, the CPU, the threads and the sources; it is kept
beside the measured costs, so that the self-test (`models.runners.what_varies`) runs once."""

from __future__ import annotations

import logging
import platform
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from paceline import registry
from paceline.controllers.auto import CostKey, CostStore
from paceline.models import Runner
from paceline.models.passes import (
    NOT_STRICT_IN_TRANSFORMERS,
    NOT_STRICT_WITH_SOURCE,
    StrictPasses,
    strict_unavailable,
    why_not_strict,
)
from paceline.models.runners import (
    EncoderDecoderRunner,
    NativeRunner,
    RecurrentRunner,
    SkippingRunner,
    ThoughtRunner,
    native_of,
    what_varies,
)
from paceline.utils import need, user_cache

logger = logging.getLogger("paceline")
Tested = NativeRunner | RecurrentRunner | EncoderDecoderRunner


@dataclass(frozen=True, slots=True)
class Exactness:
    """What holds between plain and accelerated decoding at temperature 0 and, for point drafts, for equal seeds.

    Attributes:
        reason: why bits may differ; None where they may not.
    """

    reason: str | None = None

    @property
    def proven(self) -> bool:
        """Whether tokens are bit for bit those of plain decoding, at any batch size."""
        return self.reason is None

    def __str__(self) -> str:
        return "strict, proven by self-test" if self.reason is None else f"up to near ties ({self.reason})"


def reject_approximate(rule: str) -> None:
    """Reject a rule of acceptance that changes the output in strict mode.

    Raises:
        ConfigError: it is approximate at some temperature.
    """
    exact = "approximate" not in registry.lookup("verifiers", rule).exactness
    need(exact, "acceptance_method", "be an exact rule with exactness='strict'", rule)


def reject_routing(method: str) -> None:
    """Reject a search that lets a second model write in strict mode.

    Raises:
        ConfigError: it is one.
    """
    need(
        registry.lookup("searches", method).kind != registry.ROUTING,
        "search",
        "be a method in which the model alone writes with exactness='strict'",
        method,
    )


def find_exactness(runner: Runner, requested: str) -> Exactness:
    """What holds for a loaded model.

    Args:
        requested: "auto" or "strict".
    Raises:
        ConfigError: strict was requested and is not possible.
    """
    reason = _reason(runner)
    if reason is not None and requested == "strict":
        raise strict_unavailable(runner.info.name, reason)
    return Exactness(reason)


def _reason(runner: object) -> str | None:
    native = runner.native if isinstance(runner, EncoderDecoderRunner) else native_of(runner)
    if native is None:
        return NOT_STRICT_IN_TRANSFORMERS
    if (known := _approximates(runner, native) or why_not_strict(native.spec, native.info.device)) is not None:
        return known
    if not native.passes.row_invariant:
        if isinstance(native.passes, StrictPasses):
            return "PyTorch's matrix products on this CPU add in an order that depends on the number of rows"
        if isinstance(runner, EncoderDecoderRunner):
            return NOT_STRICT_WITH_SOURCE
        return "PyTorch's operators in their fastest form; exactness='strict' takes another one"
    tested = runner if isinstance(runner, RecurrentRunner | EncoderDecoderRunner) else native
    varying = _kept(_key(tested, native), lambda: _tested(tested))
    return None if varying is None else f"the self-test found other bits in {varying}"


def _approximates(runner: object, native: NativeRunner) -> str | None:
    if isinstance(runner, SkippingRunner | ThoughtRunner):
        return f"{runner.method} leaves out a part of the passes, whose sums depend on the rows of a pass"
    if native.selection is None:
        return None
    return f"kv_selection {native.selection.name!r} sums a part of the text, in an order that depends on the rows"


def _tested(runner: Tested) -> str | None:
    """The self-test's finding. Compiled passes take about a second; PyTorch's operators take longer, which is logged
    before.
    """
    if runner.info.passes == StrictPasses.name:
        logger.warning(
            "%s: testing for exactness='strict' whether the bits of a row depend on the rows beside it; this takes "
            "some seconds, once for this model, dtype and machine where the result can be stored on disk",
            runner.info.name,
        )
    return what_varies(runner)


def _kept(key: CostKey, find_out: Callable[[], str | None]) -> str | None:
    """The finding from disk, or a new one, which is kept."""
    store = CostStore(key, user_cache("exactness"))
    kept = store.load()
    if kept is not None and "varies" in kept:
        stored: str | None = kept["varies"]
        return stored
    varying = find_out()
    logger.debug("self-test of strict mode: %s", "passed" if varying is None else f"other bits in {varying}")
    store.save({"varies": varying})
    return varying


def _key(tested: Tested, native: NativeRunner) -> CostKey:
    key = passes_key(native)
    if not isinstance(tested, EncoderDecoderRunner):
        return key
    encoder = zlib.crc32(repr((tested.source, tested.reads_alone)).encode())
    return replace(key, fingerprint=f"{key.fingerprint}-{encoder:08x}")


def passes_key(runner: NativeRunner) -> CostKey:
    key = CostKey.of(runner.info)
    kinds = zlib.crc32(repr((runner.spec.layers, runner.info.max_context)).encode())
    form = f"{type(runner.passes).__name__}-{kinds:08x}-{sources():08x}"
    return replace(key, fingerprint=f"{key.fingerprint}-{form}", device=f"{key.device} {_cpu()}")


@cache
def sources() -> int:
    """A number that changes with the code that computes a pass."""
    digest, parts = 0, (Path(__file__).parents[1] / name for name in ("checkpoints", "models"))
    for path in sorted(path for part in parts for path in part.rglob("*.py")):
        digest = zlib.crc32(path.read_bytes(), digest)
    return digest


@cache
def _cpu() -> str:
    """The CPU's model and, where the system tells them, its features."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines() if cpus.exists() else []
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in known.items()}
    features = zlib.crc32((fields.get("flags") or fields.get("Features") or "").encode())
    return f"{fields.get('model name') or platform.processor() or platform.machine()} {features:08x}"
