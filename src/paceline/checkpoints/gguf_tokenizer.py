"""The tokenizer in a GGUF file's metadata, built with the `tokenizers` library.

Two kinds are read. "gpt2" is byte-level BPE: the file holds vocabulary and merges, and names the rule by which text is
cut into words before merging (`tokenizer.ggml.pre`), whose regular expression is that of the models' own
`tokenizer.json`. "llama" is SentencePiece's BPE, which has no merges but a score for each token: two neighbours merge
into the token of the highest score, so every way to cut a token in two is a merge, ranked by that score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf_file import GgufFile, read_gguf
from paceline.checkpoints.gguf_keys import refuse_unread_of_tokenizer
from paceline.errors import CheckpointError, UnsupportedModelError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Types of tokens; 1 is normal."""

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEHIND = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{BEHIND}"
QWEN2 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{BEHIND}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = CASED.replace("{0}", "") + r"|\p{N}" + SLASHED
GPT4O = CASED.replace("{0}", f"{ENDINGS}?") + r"|\p{N}{1,3}" + SLASHED


@dataclass(frozen=True, slots=True)
class Cutting:
    """How text is cut before merging.

    Attributes:
        patterns: one after another, each cuts what the last has left; what matches is a word, and what lies between.
        whole: a word that is a token is taken as it is, whatever the merges make of it.
        begins: a start token is put first where the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_DIGITS = Cutting((r"\p{N}", GPT2))
_LLAMA3 = Cutting((LLAMA3,), whole=True, begins=True)
_QWEN2 = Cutting((QWEN2,))
_PLAIN = Cutting((GPT2,))
_CASED3 = Cutting((GPT4O,))
_LATER = r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}"
_LATER += r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}"
"""Letters with a case that the rule of DeepSeek leaves out."""
_SIGNS = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_LLM = (r"[\r\n]", rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_LATER}]]+", rf"\s?[{_SIGNS}]+", r"\s+$", _CJK, r"\p{N}+")
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_SEED = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

PRE: Mapping[str, Cutting] = {
    "default": Cutting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "gigachat", "mellum"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Cutting((LLAMA3,))),
    "glm4": Cutting((LLAMA3,), whole=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "tekken": Cutting((TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _CASED3),
    "deepseek-coder": Cutting(_CODER),
    "deepseek-llm": Cutting(_LLM),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Cutting(_V3)),
    "seed-coder": Cutting((_SEED,)),
}
"""Rules by the name that files give them; several models share one."""

ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_role|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Control tokens that end an answer, whether the file says so or not."""

HARMONY = {"<|return|>", "<|call|>"}
"""Tokens of gpt-oss, of whose answers "<|end|>" ends one message of several."""


def gguf_tokenizer(path: Path) -> tuple[Any, dict[str, str], str | None]:
    """The tokenizer of a GGUF file: a `tokenizers.Tokenizer`, its named tokens ("bos_token", ...), its chat template.

    Raises:
        CheckpointError: the file holds none, or a damaged one.
        UnsupportedModelError: a kind of tokenizer, or a rule of cutting, that is not known.
    """
    file = read_gguf(path)
    tokens, kinds = _list(file, "tokens"), _list(file, "token_type")
    refuse_unread_of_tokenizer(file)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens have {len(kinds)} types; download it again")
    model = file.metadata.get("tokenizer.ggml.model")
    vocab = _vocabulary(tokens, kinds)
    if model == "gpt2":
        inner, begins = _byte_level(file, vocab)
    elif model == "llama":
        inner, begins = _by_scores(file, tokens, vocab), True
    else:
        raise UnsupportedModelError(
            f"{path}: a tokenizer of kind {model!r} cannot be read from GGUF; known are gpt2 and llama; give "
            f"tokenizer=FOLDER"
        )
    _add_tokens(inner, tokens, kinds)
    named = _named(file, tokens)
    _add_ends(file, inner, named, begins)
    template = file.metadata.get("tokenizer.chat_template")
    return inner, named, template if isinstance(template, str) else None


def _list(file: GgufFile, key: str, *, least: int = 1) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or len(value) < least:
        raise CheckpointError(f"{file.path} holds no tokenizer ({key} is missing); give tokenizer=FOLDER")
    return value


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Ids by token, without those that stand for rows of the embedding that are no tokens."""
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED or token != f"[PAD{index}]"
    }


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> tuple[Any, bool]:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PRE:
        raise UnsupportedModelError(
            f"{file.path}: its tokenizer cuts text by the rule {name!r} (tokenizer.ggml.pre), which is not known; give "
            f"tokenizer=FOLDER with the tokenizer.json of the model"
        )
    rule = PRE[name]
    merges = [_halves(merge) for merge in _list(file, "merges")]
    try:
        inner = Inner(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.path}: its tokenizer is damaged ({error}); download it again") from error
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner, rule.begins


def _halves(merge: str) -> tuple[str, str]:
    """Two tokens apart at a space, of which the first may begin with one."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _by_scores(file: GgufFile, tokens: Sequence[str], vocab: dict[str, int]) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers

    scores = _list(file, "scores", least=len(tokens))
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{file.path}: its unknown token is {unknown!r} of {len(tokens)}; download it again")
    merges = _merges(vocab, scores)
    inner = Inner(models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return inner


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, those of the highest score first."""
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[index], left, right, token[:cut], token[cut:]))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _add_tokens(inner: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    def added(kind: int, *, special: bool) -> Iterable[AddedToken]:
        for token, token_kind in zip(tokens, kinds, strict=True):
            if token_kind == kind and token:
                yield AddedToken(token, special=special, normalized=False)

    inner.add_special_tokens(list(added(CONTROL, special=True)))
    inner.add_tokens(list(added(USER_DEFINED, special=False)))


def _named(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
    contents = {}
    for theirs, ours in keys.items():
        index = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            contents[f"{ours}_token"] = tokens[index]
    return contents


def _add_ends(file: GgufFile, inner: Any, named: Mapping[str, str], begins: bool) -> None:
    """Start and end tokens around every text, as far as the file wants them."""
    from tokenizers import processors

    first = bool(file.metadata.get("tokenizer.ggml.add_bos_token", begins)) and "bos_token" in named
    last = bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in named
    if not first and not last:
        return
    around = [*([named["bos_token"]] if first else []), "$A", *([named["eos_token"]] if last else [])]
    used = {token: inner.token_to_id(token) for token in around if token != "$A"}
    inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=list(used.items()))


def gguf_end_ids(path: Path) -> tuple[int, ...]:
    """Tokens that end an answer, the file's own end token first; none where it holds no tokenizer."""
    metadata = read_gguf(path).metadata
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return ()
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    index = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL}
    ends = [token for token in ENDS if token in index and not (token == "<|end|>" and index.keys() >= HARMONY)]
    return tuple(dict.fromkeys([token for token in named if isinstance(token, int)] + [index[token] for token in ends]))
