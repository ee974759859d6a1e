"""The fallback runner against from-scratch passes of the same model, over random lives of sequences."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.assembly import build_parts
from paceline.config import SpeculativeConfig
from paceline.errors import CapabilityError, CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.runners.fallback import transformers_cache
from paceline.models.runners.fallback.runner import FallbackCache, TransformersRunner
from paceline.models.runners.fallback.transformers_cache import CausalModel, CroppedHistory, History, ReplayedHistory
from paceline.tree import EMPTY_TREE, TokenTree

VOCAB = 97
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = SMALL | {"num_key_value_heads": 1, "intermediate_size": 64}
DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
ZAMBA = {
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "attention_head_dim": 32,
    "attention_hidden_size": 64,
    "num_mem_blocks": 1,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
    "mamba_headdim": 16,
    "layers_block_type": ["mamba", "hybrid"],
    "hybrid_layer_ids": [1],
}
SLIDING = ["sliding_attention", "full_attention"]
GEMMA = GROUPED | {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4, "layer_types": 2 * SLIDING}
GEMMA |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
GEMMA_MIXTURE = GEMMA | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 32}
GEMMA_MIXTURE |= {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA_MIXTURE |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
LLAMA4 = GROUPED | {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
LLAMA4 |= {"attention_chunk_size": 7, "floor_scale": 4, "no_rope_layer_interval": 2, "num_hidden_layers": 4}
KINDS = {"gemma4_text-mixture": "gemma4_text"}
"""Names below -> the types that they are of, where these differ."""

FAMILIES: dict[str, tuple[dict[str, Any], type[History]]] = {
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}, CroppedHistory),
    "gpt_neox": (SMALL | {"intermediate_size": 64}, CroppedHistory),
    "opt": (SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 96}, CroppedHistory),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, CroppedHistory),
    "falcon": (SMALL, CroppedHistory),
    "starcoder2": (GROUPED | {"sliding_window": 5}, CroppedHistory),
    "gpt_oss": (
        GROUPED | {"sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        CroppedHistory,
    ),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ReplayedHistory),
    "falcon_mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ReplayedHistory),
    "lfm2": (GROUPED | {"layer_types": ["conv", "full_attention"]}, ReplayedHistory),
    "qwen3_next": (GROUPED | DELTA, ReplayedHistory),
    "olmo_hybrid": (GROUPED | LINEAR, ReplayedHistory),
    "zamba2": (SMALL | ZAMBA, ReplayedHistory),
    "gemma3n_text": (
        GEMMA | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
        CroppedHistory,
    ),
    "gemma4_text": (GEMMA | {"global_head_dim": 32, "use_double_wide_mlp": True}, CroppedHistory),
    "gemma4_text-mixture": (GEMMA_MIXTURE, CroppedHistory),
    "llama4_text": (LLAMA4, CroppedHistory),
    "openai-gpt": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96}, History),
}

ROUNDING = {"zamba2": 1e-3}
"""What chunks and single tokens may differ by in transformers itself, where that is much."""


def tiny(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind = KINDS.get(family, family)
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, initializer_range=0.2, **ends, **FAMILIES[family][0])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest) -> TransformersRunner:
    return TransformersRunner(tiny(request.param), name=request.param)


def scratch(runner: TransformersRunner, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = runner.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


class Life:
    """Sequences that are extended, scored, committed, cut and forked at random, each with the tokens its cache should
    hold.
    """

    def __init__(self, runner: TransformersRunner, seed: int) -> None:
        self.runner, self.rng = runner, random.Random(seed)
        self.all: list[tuple[FallbackCache, list[int]]] = [(runner.open(), []) for _ in range(2)]
        self.worst = 0.0

    def some(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(low, high))]

    def compare(self, rows: torch.Tensor, tokens: list[int]) -> None:
        expected = scratch(self.runner, tokens)[-len(rows) :]
        self.worst = max(self.worst, float((rows - expected).abs().max()))

    def extend(self) -> None:
        new, every = [self.some(1, 6) for _ in self.all], self.rng.random() < 0.5
        scores = self.runner.extend([cache for cache, _ in self.all], new, all_logits=every)
        for i, ((_, tokens), more) in enumerate(zip(self.all, new, strict=True)):
            tokens.extend(more)
            assert len(scores.of(i)) == (len(more) if every else 1)
            self.compare(scores.of(i), tokens)

    def score(self, commit: bool) -> None:
        chains = [self.some(1, 5) for _ in self.all]
        caches, roots = [cache for cache, _ in self.all], [chain[0] for chain in chains]
        grown = [self.rng.randint(1, len(chain)) for chain in chains]
        done = [0] * len(chains)
        for stops in (grown, [len(chain) for chain in chains]):
            if any(stop <= start for start, stop in zip(done, stops, strict=True)):
                continue
            trees = [TokenTree.chain(chain[1:stop]) for chain, stop in zip(chains, stops, strict=True)]
            scores = self.runner.score(caches, roots, trees, computed=done)
            for i, ((_, tokens), chain) in enumerate(zip(self.all, chains, strict=True)):
                self.compare(scores.of(i), tokens + chain[: stops[i]])
                assert len(scores.of(i)) == stops[i] - done[i]
            done = list(stops)
        if commit:
            paths = [list(range(self.rng.randint(0, stop - 1))) for stop in done]
            self.runner.commit(caches, paths)
            for (_, tokens), chain, path in zip(self.all, chains, paths, strict=True):
                tokens.extend(chain[: 1 + len(path)])

    def cut(self) -> None:
        cache, tokens = self.rng.choice(self.all)
        length = self.rng.randint(max(0, len(tokens) - 4), len(tokens))
        self.runner.truncate(cache, length)
        del tokens[length:]

    def fork(self) -> None:
        at = self.rng.randrange(len(self.all))
        cache, tokens = self.all[at]
        self.all[1 - at] = (self.runner.fork(cache), list(tokens))

    def run(self, steps: int) -> float:
        self.extend()
        for _ in range(steps):
            act = self.rng.choice(
                [self.extend, lambda: self.score(True), lambda: self.score(False), self.cut, self.fork]
            )
            act()
            assert all(cache.length == len(tokens) for cache, tokens in self.all)
            if max(cache.length for cache, _ in self.all) > 60:
                break
        self.extend()
        return self.worst


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_a_pass_from_scratch(runner: TransformersRunner, seed: int) -> None:
    assert Life(runner, seed).run(14) < ROUNDING.get(runner.info.name, 1e-4)


def test_each_family_gets_the_history_it_needs(runner: TransformersRunner) -> None:
    assert runner.history_kind == FAMILIES[runner.info.name][1].__name__


def test_taps_are_the_hidden_states_of_transformers(runner: TransformersRunner) -> None:
    if runner.info.name == "gemma3n_text":  # whose layers give four states a token
        assert not runner.capabilities.taps
        return
    assert runner.capabilities.taps
    tokens, cache, layers = [5, 9, 2, 40, 41], runner.open(), runner.info.num_layers
    scores = runner.extend([cache], [tokens[:2]], taps=range(-1, layers + 1))
    rest = runner.score([cache], tokens[2:3], [TokenTree.chain(tokens[3:])], taps=range(-1, layers + 1))
    with torch.inference_mode():
        hidden = runner.model(
            input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
    counted_from_one = ("mamba", "falcon_mamba")  # their hidden_states begin with the first layer's output
    for layer in () if runner.info.name in counted_from_one else (-1, 0, layers):
        found = torch.cat([scores.taps[layer], rest.taps[layer]])
        assert torch.allclose(found, hidden[min(layer + 1, layers)][0], atol=1e-4)
    if runner.info.name not in (
        "gpt2",
        "opt",
        "bloom",
        "openai-gpt",
    ):  # these add positions or a norm to the embeddings
        embedded = torch.cat([scores.taps[-1], rest.taps[-1]])
        assert torch.allclose(embedded, runner.model.get_input_embeddings()(torch.tensor(tokens)))
    last = torch.cat([scores.taps[layers], rest.taps[layers]])
    assert torch.allclose(runner.model.get_output_embeddings()(last)[-3:], rest.logits, atol=1e-4)


class Copies:
    """Counts how often states are copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, kept = 0, transformers_cache.before_drafts

        def counted(cache: Any) -> Any:
            self.count += 1
            return kept(cache)

        monkeypatch.setattr(transformers_cache, "before_drafts", counted)

    def taken(self) -> int:
        """Since the last call."""
        count, self.count = self.count, 0
        return count


def test_a_recurrent_cache_is_copied_where_nodes_are_scored_only(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TransformersRunner(tiny("mamba"), name="mamba")
    cache, copies, text = runner.open(), Copies(monkeypatch), [5, 9, 2]
    runner.extend([cache], [text])
    for token in (7, 8, 11):  # plain decoding
        row = runner.score([cache], [token], [EMPTY_TREE]).logits
        runner.commit([cache], [()])
        text.append(token)
        assert torch.allclose(row, scratch(runner, text)[-1:], atol=1e-4)
    assert copies.taken() == 0
    runner.score([cache], [4], [TokenTree.chain([6, 3])])
    assert copies.taken() == 1
    runner.commit([cache], [[0]])
    runner.score([cache], [1], [EMPTY_TREE])  # a chain that grows, of which nothing stays
    for count in (1, 2, 3):
        runner.score([cache], [1], [TokenTree.chain([2, 3, 4][:count])], computed=[count])
    assert copies.taken() == 1
    runner.commit([cache], [()])
    text += [4, 6, 1]
    row = runner.score([cache], [12], [EMPTY_TREE]).logits
    assert torch.allclose(row, scratch(runner, [*text, 12])[-1:], atol=1e-4)
    assert cache.length == len(text)
    runner.score([cache], [13], [EMPTY_TREE])  # the same place again, so that going back there shall be cheap
    assert copies.taken() == 1


@pytest.mark.parametrize(("family", "refused"), [("mamba", True), ("lfm2", False), ("gpt2", False)])
def test_drafts_are_refused_where_each_would_take_a_pass(
    family: str, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runner = TransformersRunner(tiny(family), name=family)
    assert runner.capabilities.drafts is not refused
    config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3})
    names, parts = build_parts(runner, config, load=lambda name: runner)
    assert names == ([] if refused else ["ngram"])
    assert len(parts.drafter_set.drafters) == len(names)
    assert ("drafts are refused" in caplog.text) is refused


class Forgetful(CroppedHistory):
    """Forgets to crop."""

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


def test_the_check_catches_a_cache_that_is_not_cropped() -> None:
    runner = TransformersRunner(tiny("gpt2"), name="gpt2")
    caller = CausalModel(runner.model, torch.device("cpu"))
    runner.make_history = lambda: Forgetful(caller)
    assert Life(runner, 0).run(14) > 1e-2


def test_what_cannot_be_done_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"must lie in 2\.\.96"):
        TransformersRunner(tiny("gpt2"), name="tiny", max_context=97)
    runner = TransformersRunner(tiny("gpt2"), name="tiny", max_context=12)
    assert not runner.capabilities.trees
    cache = runner.open()
    with pytest.raises(CapabilityError, match="drafter number 3 proposed a tree that branches"):
        runner.score([cache], [1], [TokenTree.build([1, 2], [-1, -1], sources=3)])
    with pytest.raises(ConfigError, match="0 \\+ 13 tokens exceed the context of 12"):
        runner.extend([cache], [[1] * 13])
    with pytest.raises(ConfigError, match="at least one token"):
        runner.extend([cache], [[]])
    with pytest.raises(ConfigError, match="taps must lie"):
        runner.extend([cache], [[1]], taps=[7])
    runner.score([cache], [1], [TokenTree.chain([2, 3])])
    with pytest.raises(ConfigError, match="are not those scored before"):
        runner.score([cache], [1], [TokenTree.chain([5, 3, 4])], computed=[2])
    with pytest.raises(ConfigError, match="does not lie in the chain"):
        runner.commit([cache], [[1]])
    runner.score([cache], [1], [EMPTY_TREE])
    with pytest.raises(ConfigError, match="does not lie in the chain"):
        runner.commit([cache], [[0]])
    with pytest.raises(ConfigError, match="truncate"):
        runner.truncate(cache, 5)
    runner.release(cache)
    with pytest.raises(ConfigError, match="was released"):
        runner.extend([cache], [[1]])


def test_longrope_ends_where_its_angles_change() -> None:
    """transformers changes the angles of new rows only: behind that border a draft's length would decide the logits."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=128, initializer_range=0.3, rope_parameters=longrope, **sizes
    )
    torch.manual_seed(0)
    model, text = LlamaForCausalLM(config).eval(), list(range(3, 40))
    assert TransformersRunner(model, name="tiny").info.max_context == 32

    def root_row(drafted: int) -> torch.Tensor:
        with torch.no_grad():
            out = model(torch.tensor([text[:31]]), use_cache=True)
            key = next(key for key in ("cache", "past_key_values") if key in out)
            return model(torch.tensor([text[31 : 32 + drafted]]), **{key: out[key]}).logits[0, 0]

    assert (root_row(0) - root_row(3)).abs().max() > 0.01


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("gpt2").save_pretrained(str(tmp_path))
    return tmp_path


def load(folder: Path, dtype: str = "auto") -> TransformersRunner:
    return TransformersRunner.load(folder, name="tiny", device="cpu", dtype=dtype)


def test_load_describes_the_model(folder: Path) -> None:
    runner = load(folder)
    info = runner.info
    assert (info.family, info.vocab_size, info.hidden_size, info.num_layers, info.max_context) == (
        "gpt2",
        VOCAB,
        32,
        2,
        96,
    )
    assert info.weight_bytes == sum(weight.numel() for weight in runner.model.parameters()) * 4
    assert load(folder, "bfloat16").info.dtype == torch.bfloat16
    assert load(folder).info.fingerprint == info.fingerprint != load(folder, "bfloat16").info.fingerprint
    assert torch.allclose(scratch(runner, [1, 2, 3]), scratch(TransformersRunner(tiny("gpt2"), name="x"), [1, 2, 3]))


def test_the_text_part_of_a_model_is_loaded_where_the_whole_cannot_be(tmp_path: Path, monkeypatch: Any) -> None:
    """Gemma 3n as published: its vision needs a package that is not there, and its text lies behind a prefix."""
    text = tiny("gemma3n_text")
    tensors = {re.sub(r"^model\.", "model.language_model.", key): one for key, one in text.state_dict().items()}
    tensors = {key: one.contiguous() for key, one in tensors.items() if key != "lm_head.weight"}
    AutoConfig.for_model("gemma3n", text_config=text.config.to_dict()).save_pretrained(str(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def lacks_timm(*_: Any, **__: Any) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr("transformers.Gemma3nForConditionalGeneration.__init__", lacks_timm)
    runner, ids = load(tmp_path, "float32"), [5, 9, 2, 40]
    assert runner.info.family == "gemma3n_text"
    found = runner.extend([runner.open()], [ids], all_logits=True).logits
    assert torch.allclose(found, scratch(TransformersRunner(text, name="x"), ids), atol=1e-5)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="of its weights"):
        load(tmp_path, "float32")


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_folders_that_cannot_be_loaded_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    edit(folder, n_layer=3)
    with pytest.raises(CheckpointError, match=r"lacks 12 of its weights, first transformer\.h\.2"):
        load(folder)
    edit(folder, n_layer=2, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantised"):
        load(folder)
    edit(folder, quantization_config=None, model_type="unheard_of")
    with pytest.raises(UnsupportedModelError, match="architecture"):
        load(folder)
    edit(folder, auto_map={"AutoConfig": "conf.Mine", "AutoModelForCausalLM": "model.Mine"})
    with pytest.raises(UnsupportedModelError, match="pass trust_remote_code=True"):
        load(folder)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path / "nowhere")


def test_weights_must_be_whole_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(folder)
    weights.unlink()
    torch.save(tiny("gpt2").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(folder)
