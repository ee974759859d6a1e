"""The doctor: every check fires on a setup that is wrong in that respect and is silent on one that is fine; real seeded
faults.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import edit_json, edit_weights

from paceline import LLM
from paceline.assembly import MemoryUse
from paceline.checkpoints import Tokenizer
from paceline.config import SpeculativeConfig
from paceline.doctor import PassFacts, gather, visit
from paceline.doctor.checks import CHECKS, Diagnosis, break_even, chance_of, diagnose
from paceline.doctor.facts import DraftFacts, FormFacts, MachineFacts, ProbedToken, ProbeFacts, SetupFacts, TargetFacts
from paceline.doctor.gather import draft_names
from paceline.llm import BUNDLED

TARGET, DRAFT = BUNDLED / "target", BUNDLED / "draft"
PROMPTS = ["One day, a little girl named Lily found a needle", "Q: Tom has 3 apples and buys 4 more. How many?\nA:"]
WORDS = Tokenizer.load(TARGET)


def guesses(number: int, rate: float, *, confidence: float = 0.6) -> list[ProbedToken]:
    """Guesses of which a share stands; tokens are all different, so that chance is 0."""
    hits = [int((i + 1) * rate) > int(i * rate) for i in range(number)]
    return [ProbedToken(1, 2 * i if hit else 2 * i + 1, 2 * i, hit, confidence) for i, hit in enumerate(hits)]


def probe(found: list[ProbedToken] | None = None, **changes: Any) -> ProbeFacts:
    fine = {"drafter": "draft_model", "kind": "model", "draft_seconds": 1e-3, "target_seconds": {1: 10e-3, 5: 11e-3}}
    return ProbeFacts(**{**fine, "drafted_tokens": guesses(40, 0.6) if found is None else found, **changes})


MACHINE = MachineFacts(
    threads=4,
    cpus=8,
    cores=4,
    pass_seconds={4: 3e-3, 2: 5e-3, 1: 9e-3},
    memory_total=16 << 30,
    memory_available=8 << 30,
    versions={"torch": ("2.13.0", ">=2.11")},
)
MODEL = TargetFacts(
    device="cpu",
    dtype="bfloat16",
    num_layers=6,
    weight_bytes=1 << 30,
    tokenizer=WORDS,
    eos_ids=(3, 0),
    sampling={"temperature": 0.0},
)
PASSES = PassFacts(passes="compiled", processor="x, 8 CPUs", instructions="AVX2")
FINE = SetupFacts(
    machine=MACHINE,
    target=MODEL,
    passes=PASSES,
    drafts=[DraftFacts(name=str(DRAFT), tokenizer=Tokenizer.load(DRAFT))],
    probes=[probe()],
    memory=MemoryUse(weights=1 << 30, drafts=0, caches=6 << 30, speculation=1 << 20),
)


def tokenizer_with(tmp: Path, change: Callable[[dict[str, Any]], None], **named: Any) -> Tokenizer:
    """The bundled tokenizer after a change of its files."""
    folder = Path(shutil.copytree(DRAFT, tmp / "draft", dirs_exist_ok=True))
    found = json.loads((folder / "tokenizer.json").read_text())
    change(found)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    edit_json(folder / "tokenizer_config.json", **named)
    return Tokenizer.load(folder)


def nothing(found: dict[str, Any]) -> None:
    pass


def swapped(found: dict[str, Any]) -> None:
    """Two special tokens change places."""
    a, b = found["added_tokens"][1], found["added_tokens"][2]
    a["content"], b["content"] = b["content"], a["content"]
    vocabulary = found["model"]["vocab"]
    x, y = a["content"], b["content"]
    if x in vocabulary:
        vocabulary[x], vocabulary[y] = vocabulary[y], vocabulary[x]


def other_merges(found: dict[str, Any]) -> None:
    found["model"]["merges"] = found["model"]["merges"][: len(found["model"]["merges"]) // 2]


def with_machine(**changes: Any) -> Callable[[Path], SetupFacts]:
    return lambda tmp: replace(FINE, machine=replace(MACHINE, **changes))


def with_target(**changes: Any) -> Callable[[Path], SetupFacts]:
    return lambda tmp: replace(FINE, target=replace(MODEL, **changes))


def with_probe(found: list[ProbedToken] | None = None, **changes: Any) -> Callable[[Path], SetupFacts]:
    return lambda tmp: replace(FINE, probes=[probe(found, **changes)])


def with_draft(change: Callable[[dict[str, Any]], None] = nothing, **named: Any) -> Callable[[Path], SetupFacts]:
    return lambda tmp: replace(FINE, drafts=[DraftFacts(name="other", tokenizer=tokenizer_with(tmp, change, **named))])


def forms(passes: str, one: float, eight: float, dtype: str = "bfloat16") -> FormFacts:
    """Of milliseconds for one row and eight."""
    return FormFacts(passes=passes, dtype=dtype, seconds={1: one / 1e3, 8: eight / 1e3})


def with_passes(**changes: Any) -> Callable[[Path], SetupFacts]:
    return lambda tmp: replace(FINE, passes=replace(PASSES, **changes))


def with_template(template: str | None) -> Callable[[Path], SetupFacts]:
    return with_draft(chat_template=template)


TEMPLATE = json.loads((DRAFT / "tokenizer_config.json").read_text()).get("chat_template")
FAULTS: list[tuple[str, str, Callable[[Path], SetupFacts]]] = [
    (
        "versions",
        "torch is 2.4.0, but >=2.11 is needed",
        with_machine(versions={"torch": ("2.4.0", ">=2.11")}, unfit=["torch"]),
    ),
    ("versions", "rich is missing", with_machine(versions={"rich": (None, ">=13")}, unfit=["rich"])),
    ("GPU", "CPU build", with_machine(gpu="driver loaded")),
    ("GPU", "CUDA 12.8) cannot open it", with_machine(gpu="driver loaded", cuda_build="12.8")),
    ("GPU", "the model runs on the CPU", with_machine(gpu="driver loaded", cuda=True, cuda_build="12.8")),
    ("passes", "this machine lacks fused multiply-add", with_passes(passes="operators", fault="fused multiply-add")),
    (
        "passes",
        "3 ms for 1 row and 8 ms for 8 rows by PyTorch's operators, 4 ms for 1 row and 9 ms for 8 rows compiled; set",
        with_passes(forms=[forms("compiled", 4, 9), forms("operators", 3, 8)]),
    ),
    (
        "dtype",
        "3 ms for 1 row and 8 ms for 8 rows in float32, 4 ms for 1 row and 9 ms for 8 rows in bfloat16; use --dtype",
        with_passes(forms=[forms("compiled", 4, 9), forms("compiled", 3, 8, "float32")]),
    ),
    ("threads", "affinity mask allows 2 CPUs", with_machine(threads=4, cpus=2, cores=2, pass_seconds={})),
    ("threads", "quota allows 1.5 CPUs", with_machine(quota=1.5)),
    ("threads", "8 threads on 4 physical cores", with_machine(threads=8, pass_seconds={})),
    ("busy cores", "keep 6.0 of 8 CPUs busy", with_machine(load=6.0)),
    ("scaling", "30 ms with 4 threads, 9 ms with 1", with_machine(pass_seconds={4: 30e-3, 1: 9e-3})),
    ("memory", "1.0 GiB of this process are in swap", with_machine(swapped=1 << 30)),
    ("memory", "205 MiB of 16.0 GiB memory are left", with_machine(memory_available=205 << 20)),
    (
        "longest text",
        "the longest text takes 6.0 GiB of memory and its drafts 3.0 GiB more, 8.0 GiB are left",
        lambda tmp: replace(FINE, memory=MemoryUse(1 << 30, 0, 6 << 30, 3 << 30)),
    ),
    ("end tokens", "no end token is known", with_target(eos_ids=())),
    ("sampling defaults", "temperature 0.7", with_target(sampling={"temperature": 0.7})),
    (
        "setup",
        "cannot be opened: no config",
        lambda tmp: replace(FINE, drafts=[DraftFacts(name="x", tokenizer=None, error="no config")]),
    ),
    ("setup", "unknown drafter", lambda tmp: replace(FINE, error="unknown drafter 'ngrm'")),
    ("setup", "failed: it raised", with_probe(dropped="it raised")),
    ("tokenizer", "has another vocabulary: token", with_draft(swapped)),
    ("tokenizer", "splits text differently", with_draft(other_merges)),
    ("chat template", "other special tokens", with_template("{{ messages[0]['content'] }}")),
    ("chat template", "other wording", with_template("New chat. " + (TEMPLATE or ""))),
    ("chat template", "has no chat template", with_template(None)),
    ("feature layers", "reads layers [7, -2]", with_probe(taps=(2, 7, -2))),
    ("draft speed", "takes 12 ms for a token, the target 10 ms", with_probe(draft_seconds=12e-3)),
    ("draft speed", "drafts cannot pay at all", with_probe(draft_seconds=30e-3)),
    ("draft speed", "drafts pay from an acceptance of", with_probe(guesses(40, 0.3), draft_seconds=7e-3)),
    ("acceptance", "0 of 40 drafted tokens accepted (0%, by chance 0%)", with_probe(guesses(40, 0.0))),
    ("acceptance", "as if trained on another model", with_probe(guesses(40, 0.05, confidence=0.9))),
    ("acceptance", "as if untrained", with_probe(guesses(40, 0.05, confidence=0.01))),
    ("acceptance", "feature layers, its norm", with_probe(guesses(40, 0.05), kind="head")),
    ("acceptance", "proposed nothing", with_probe([])),
]


def lines(facts: SetupFacts, name: str) -> list[str]:
    return [f"{one.what}; {one.do}" for check, one in diagnose(facts).findings if check == name]


@pytest.mark.parametrize(("name", "words", "make"), FAULTS, ids=[f"{name}-{words[:24]}" for name, words, _ in FAULTS])
def test_a_check_fires(name: str, words: str, make: Callable[[Path], SetupFacts], tmp_path: Path) -> None:
    found = lines(make(tmp_path), name)
    assert any(words in line for line in found), found


def test_no_check_fires_on_a_fine_setup() -> None:
    assert diagnose(FINE).findings == []
    assert diagnose(FINE).healthy


def test_every_check_has_a_fault_that_sets_it_off() -> None:
    assert {name for name, _, _ in FAULTS} == {check.name for check in CHECKS}


@pytest.mark.parametrize(
    ("one", "eight", "more"),
    [(3, 9, {}), (4, 3, {}), (3.9, 8.8, {}), (5, 12, {}), (3, 8, {"crowded": True})],
    ids=["faster for one row", "faster for eight", "hardly faster", "slower", "beside other programs"],
)
@pytest.mark.parametrize(("passes", "dtype"), [("operators", "bfloat16"), ("compiled", "float32")])
def test_a_form_is_named_only_where_it_was_clearly_faster_for_one_row_and_for_eight(
    passes: str, dtype: str, one: float, eight: float, more: dict[str, Any]
) -> None:
    facts = with_passes(forms=[forms("compiled", 4, 9), forms(passes, one, eight, dtype)], **more)(Path())
    assert diagnose(facts).findings == []


def test_without_a_measurement_no_dtype_is_called_slow() -> None:
    assert diagnose(with_target(dtype="bfloat16")(Path())).findings == []
    assert diagnose(with_passes(passes="operators", lacks="sizes that do not fill vectors")(Path())).findings == []


def test_hints_do_not_make_a_setup_ill() -> None:
    assert diagnose(with_target(sampling={"temperature": 0.7})(Path())).healthy
    assert not diagnose(with_machine(quota=1.5)(Path())).healthy


def test_copying_drafters_need_not_find_anything() -> None:
    assert diagnose(with_probe(guesses(40, 0.0), kind="table", draft_seconds=0.0)(Path())).findings == []


def test_few_guesses_prove_nothing() -> None:
    assert lines(with_probe(guesses(8, 0.0))(Path()), "acceptance") == []


def test_a_target_that_repeats_itself_is_no_fault_of_the_drafter() -> None:
    assert lines(with_probe([ProbedToken(1, 5, 5, True, 0.9)] * 40)(Path()), "acceptance") == []


def test_on_a_gpu_the_cpus_matter_less() -> None:
    facts = with_machine(quota=1.0, load=8.0, cuda=True)(Path())
    assert diagnose(replace(facts, target=replace(MODEL, device="cuda"))).findings == []


def test_break_even_solves_the_balance() -> None:
    found = break_even(probe(draft_seconds=2e-3, target_seconds={1: 10e-3, 2: 10e-3}))
    assert found == pytest.approx(0.2, abs=1e-6)  # 1 + a tokens for 12 ms against 1 for 10 ms
    assert break_even(probe(draft_seconds=30e-3)) is None


def test_chance_is_agreement_at_other_places() -> None:
    same = [ProbedToken(1, 7, 7, True, 0.5)] * 10
    assert chance_of(same) == 1.0
    assert chance_of(guesses(40, 1.0)) == 0.0
    half = [ProbedToken(1, i % 2, i % 2, True, 0.5) for i in range(1000)]
    assert chance_of(half) == pytest.approx(0.5, abs=0.01)


class TestMachine:
    """Reading /proc and /sys, of a made-up machine."""

    def write(self, root: Path, **files: str) -> Path:
        for name, text in files.items():
            path = root / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    def test_quota(self, tmp_path: Path) -> None:
        assert gather.quota(tmp_path) is None
        own = tmp_path / "sys/fs/cgroup/jobs/one/cpu.max"
        own.parent.mkdir(parents=True)
        own.write_text("150000 100000\n")
        self.write(tmp_path, proc__self__cgroup="0::/jobs/one\n")
        assert gather.quota(tmp_path) == 1.5
        own.write_text("max 100000\n")
        assert gather.quota(tmp_path) is None

    def test_quota_of_version_1(self, tmp_path: Path) -> None:
        folder = tmp_path / "sys/fs/cgroup/cpu"
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text("50000")
        (folder / "cpu.cfs_period_us").write_text("100000")
        assert gather.quota(tmp_path) == 0.5
        (folder / "cpu.cfs_quota_us").write_text("-1")
        assert gather.quota(tmp_path) is None

    def test_cores_are_counted_once(self, tmp_path: Path) -> None:
        for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(siblings)
        assert gather.cores(frozenset(range(4)), tmp_path) == 2
        assert gather.cores(frozenset({0, 2}), tmp_path) == 1

    def test_swap_gpu(self, tmp_path: Path) -> None:
        assert gather.gpu(tmp_path) is None
        self.write(tmp_path, proc__self__status="VmSwap:\t  12 kB\n")
        assert gather.swapped(tmp_path) == 12 * 1024
        self.write(tmp_path, proc__driver__nvidia__version="x")
        assert gather.gpu(tmp_path) == "driver loaded"

    def test_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found, unfit = gather.versions()
        assert unfit == []
        assert found["torch"][0].split("+")[0] == torch.__version__.split("+")[0]
        assert "pytest" not in found
        monkeypatch.setattr(
            gather, "requires", lambda name: ["torch>=99", "no-such-package>=1", 'hypothesis; extra == "test"']
        )
        found, unfit = gather.versions()
        assert unfit == ["torch", "no-such-package"]
        assert found["no-such-package"] == (None, ">=1")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def seen(llm: LLM, draft: Path) -> dict[str, str]:
    """Name of the check -> what it said, for a draft of the bundled target; timings left out."""
    found = visit(llm, {"method": "draft_model", "model": str(draft)}, PROMPTS)
    timed = ("busy cores", "scaling", "draft speed", "memory")
    return {name: one.what for name, one in found.diagnosis.findings if name not in timed and not one.hint}


def test_the_bundled_pair_is_fine(llm: LLM) -> None:
    assert seen(llm, DRAFT) == {}


def test_long_parts_are_told(llm: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    visit(llm, {"method": "ngram"}, PROMPTS[:1], lambda *one: told.append(one))
    stages = ("looking at the machine", "timing passes", "probing drafters")
    assert told == [(stage, done, 1) for stage in stages for done in (0, 1)]


def test_each_check_ends_in_one_stage_and_is_told_there(llm: LLM) -> None:
    told: list[Diagnosis] = []
    whole = visit(llm, {"method": "nothing of this name"}, PROMPTS[:1], told=told.append)
    assert [name for part in told for name in part.asked] == [check.name for check in CHECKS]
    assert [part for part in told if "setup" in part.asked] == [told[-1]]  # where the method fails
    assert [finding for part in told for finding in part.findings] == list(whole.diagnosis.findings)


def test_a_drafter_that_auto_leaves_out_is_no_fault(llm: LLM) -> None:
    slow = with_probe(draft_seconds=12e-3)(Path())
    assert not diagnose(slow).healthy
    assert diagnose(replace(slow, automatic=True)).healthy
    assert visit(llm, {"method": "auto"}, PROMPTS[:1]).facts.automatic
    assert not visit(llm, {"method": "ngram"}, PROMPTS[:1]).facts.automatic


def test_a_draft_with_another_tokenizer(llm: LLM, tmp_path: Path) -> None:
    tokenizer_with(tmp_path, other_ids)
    found = seen(llm, tmp_path / "draft")
    assert "has another vocabulary" in found["tokenizer"]
    assert "another tokenizer" in found["setup"]


def other_ids(found: dict[str, Any]) -> None:
    """Ordinary tokens change places in pairs."""
    vocabulary = found["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)[2000:4000]
    for a, b in zip(names[::2], names[1::2], strict=True):
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def test_a_draft_with_swapped_special_tokens(llm: LLM, tmp_path: Path) -> None:
    tokenizer_with(tmp_path, swapped)
    assert "token 1 is '<|user|>'" in seen(llm, tmp_path / "draft")["tokenizer"]


def test_a_draft_with_shuffled_weights(llm: LLM, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))

    def shuffle(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if tensor.dim() == 2:
                weights[name] = tensor[torch.randperm(len(tensor))].contiguous()

    edit_weights(draft, shuffle)
    found = seen(llm, draft)
    assert set(found) == {"acceptance"}
    assert "drafted tokens accepted (" in found["acceptance"]


def test_a_draft_that_is_not_there(llm: LLM, tmp_path: Path) -> None:
    assert "cannot be opened" in seen(llm, tmp_path / "none")["setup"]


def test_plain_decoding_has_no_drafter_to_probe(llm: LLM) -> None:
    found = visit(llm, None, PROMPTS)
    assert not found.facts.probes
    assert not found.facts.drafts


@pytest.mark.parametrize(
    ("config", "bundled", "names"),
    [
        ({"method": "auto"}, True, [str(DRAFT)]),
        ({"method": "auto"}, False, []),
        ({"method": "ngram"}, True, []),
        ({"method": ["ngram", {"method": "draft_model", "model": "x"}]}, True, ["x"]),
        ({"method": ["ngram", "draft_model"]}, True, [str(DRAFT)]),
    ],
)
def test_draft_names(config: dict[str, Any], bundled: bool, names: list[str]) -> None:
    assert draft_names(SpeculativeConfig.parse(config), bundled=bundled) == names
