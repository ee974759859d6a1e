"""Text to token ids and back, as the checkpoint's own files say.

`tokenizer.json` is read with the `tokenizers` library alone, since importing transformers takes seconds; a folder
without that file goes to transformers' AutoTokenizer, imported only then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from paceline.checkpoints.chat_template import ChatTemplate, Rendered
from paceline.checkpoints.gguf_file import is_gguf
from paceline.checkpoints.gguf_tokenizer import gguf_tokenizer
from paceline.checkpoints.marian_file import MARIAN_TOKENS, marian_path
from paceline.checkpoints.special_tokens import SpecialTokens
from paceline.checkpoints.tokenizer_backends import FastBackend, SlowBackend, TokenizerBackend
from paceline.checkpoints.tracked_text import BLANK
from paceline.errors import CheckpointError, ConfigError, PacelineError, PromptError
from paceline.utils import keys_once, need, shortened

ANSWER = "Hi there."
TALK = (
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And now?"},
)
"""A conversation that shows how a chat template ends an answer."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
LARGEST_ID = 2**31
"""Beyond all ids that a library of tokenizers has a number for."""
TOKENIZER_FILES = ("tokenizer.json", *SENTENCEPIECE, "tekken.json", "vocab.json", "vocab.txt")


class Tokenizer:
    """The tokenizer of one checkpoint; build it with `Tokenizer.load`.

    Attributes:
        name: folder it came from, for messages.
        named: "bos_token", "eos_token", ... -> token, as far as the checkpoint names them.
        special_ids: ids that `skip_special_tokens` leaves out.
        added_ids: ids of tokens that are read as one wherever their text stands.
        literal_ids: ids of tokens that write what they read, though their signs also spell bytes (`byte_level`).
        bos_id, eos_id: ids of the named tokens, or None.
        vocab_size: number of tokens, added ones included (the model's head may be padded beyond it).
    """

    def __init__(
        self, backend: TokenizerBackend, *, name: str, named: Mapping[str, str], template: str | None = None
    ) -> None:
        self.name, self.named, self._backend, self._template = name, dict(named), backend, template
        self._tokens: dict[int, str] | None = None
        self._fingerprint: str | None = None
        self._special_tokens: SpecialTokens | None = None
        self.vocab_size = backend.size()
        self.special_ids, self.literal_ids = frozenset(backend.special_ids()), frozenset(backend.literal_ids())
        self.added_ids = frozenset(backend.added_ids())
        self.bos_id = backend.index(self.named["bos_token"]) if "bos_token" in self.named else None
        self.eos_id = backend.index(self.named["eos_token"]) if "eos_token" in self.named else None

    @classmethod
    def load(cls, folder: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: no such folder, no tokenizer in it, or a file that cannot be read.
        """
        path = Path(folder)
        if is_gguf(path) and path.is_file():
            inner, named, template = gguf_tokenizer(path)
            return cls(FastBackend(inner), name=str(path), named=named, template=template)
        if not path.is_dir():
            raise CheckpointError(f"no tokenizer: {str(path)!r} is not a folder; give a checkpoint folder")
        if marian_path(path) is not None:
            return _of_marian(path)
        if (path / "tokenizer.json").is_file():
            return _from_json(path)
        if not any((path / name).is_file() for name in (*TOKENIZER_FILES, "tokenizer_config.json")):
            raise CheckpointError(
                f"no tokenizer in {str(path)!r}: none of {', '.join(TOKENIZER_FILES)}; pass tokenizer=FOLDER "
                f"(--tokenizer FOLDER)"
            )
        return _from_transformers(path, trust_remote_code)

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Token ids of a text, with the start and end tokens that the checkpoint adds, if any.

        Args:
            most: tokens that it may have; None is any number. A longer text is rejected before a list is made of it.
        Raises:
            PromptError: not a text, one that is not valid Unicode, or one of too many tokens.
        """
        if not isinstance(text, str):
            raise PromptError(f"a prompt to encode must be a string, got {type(text).__name__}")
        check_unicode(text)
        return self._backend.encode(text, add_special_tokens, most)

    def framed(self, ids: Sequence[int]) -> list[int]:
        """Token ids with the start and end tokens that the checkpoint adds to those of a text, if any."""
        whole, inside = self.encode("a"), self.encode("a", add_special_tokens=False)
        start = whole.index(inside[0])
        return [*whole[:start], *ids, *whole[start + len(inside) :]]

    def encode_plain(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids of a text by itself, in which what spells like special tokens is text.

        Args:
            most: as in `encode`.
        Raises:
            PromptError: as `encode`.
        """
        return self.encode_rendered(Rendered(text, BLANK * len(text), exact=True), most=most)

    def encode_rendered(self, rendered: Rendered, *, most: int | None = None) -> list[int]:
        """Token ids of a conversation, whose special tokens are those that the chat template wrote.

        What messages and tools spell like special tokens is text.

        Args:
            most: as in `encode`.
        Raises:
            PromptError: as `encode`; or they cannot be told from the template's own.
        """
        ids = self.encode(rendered.text, add_special_tokens=False, most=most)
        if not self._backend.finds_special():
            return ids
        if self._special_tokens is None:
            self._special_tokens = SpecialTokens(self._backend)
        return self._special_tokens.apart(ids, rendered, most)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, allow_special_tokens: bool = False, **template: Any
    ) -> tuple[str, list[int]]:
        """The prompt text of a conversation and its token ids.

        Args:
            messages, template: as in `apply_chat_template`.
            allow_special_tokens: what messages spell like special tokens becomes them.
        Raises:
            ConfigError, CheckpointError, PromptError: as `apply_chat_template` and `encode_rendered`.
        """
        if allow_special_tokens:
            text = self.apply_chat_template(messages, **template)
            return text, self.encode(text, add_special_tokens=False)
        rendered = self.template(template.pop("chat_template", None)).apply_tracked(messages, **template)
        return rendered.text, self.encode_rendered(rendered)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool | Collection[int] = True) -> str:
        """The text of token ids; ids beyond the vocabulary give no text, incomplete UTF-8 gives U+FFFD.

        Args:
            skip_special_tokens: leave them out, or those that are given.
        """
        skip = skip_special_tokens is True
        if not isinstance(skip_special_tokens, bool):
            ids = [index for index in ids if index not in skip_special_tokens]
        try:
            return self._backend.decode(list(ids), skip)
        except OverflowError:  # of ids that the library has no numbers for
            return self._backend.decode([index for index in ids if 0 <= index < LARGEST_ID], skip)

    def token_text(self, index: int) -> str:
        """The text of one token as it reads inside a text, a leading space kept; "" for ids beyond the vocabulary."""
        text, token = self._backend.decode([index], False), self._backend.token(index) or ""
        return f" {text}" if token.startswith("\u2581") and not text.startswith(" ") else text

    def has_text(self, index: int, skip_special_tokens: bool | Collection[int] = True) -> bool:
        """Whether a token counts when a text is decoded: it is in the vocabulary and not left out as special."""
        skipped = skip_special_tokens
        if isinstance(skipped, bool):
            skipped = self.special_ids if skipped else ()
        return index not in skipped and self._backend.token(index) is not None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own."""
        return self._template

    def to_transformers(self) -> Any:
        """The same tokenizer as an object of transformers."""
        if isinstance(self._backend, SlowBackend):
            return self._backend.inner
        from transformers import PreTrainedTokenizerFast

        inner = self._backend.inner  # type: ignore[attr-defined]  # the other one has such too
        return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=self._template, **self.named)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`, or see `encode_chat`.

        Args:
            messages: dicts with "role" and "content".
            add_generation_prompt: end with the header that makes the model answer; None does so unless
                `continue_final_message`.
            chat_template: a text that replaces the checkpoint's template.
            continue_final_message: end inside the last message, for the model to continue it.
            kwargs: further names for the template, such as `tools` or `enable_thinking`; None is not given.
        Raises:
            ConfigError: the checkpoint has no chat template, or one that does not read one of `kwargs`; the last
                message cannot both be continued and answered.
            CheckpointError: a broken template.
            PromptError: messages that the template rejects or fails on.
        """
        return self.template(chat_template).apply(
            messages, add_generation_prompt, continue_final_message=continue_final_message, **kwargs
        )

    def template(self, template: str | None = None) -> ChatTemplate:
        """The checkpoint's chat template, or one that replaces it.

        Raises:
            ConfigError: there is none.
        """
        need(template is None or isinstance(template, str), "chat_template", "be a text", template)
        if (text := self._template if template is None else template) is None:
            raise ConfigError(
                f"{self.name} has no chat template; use generate with a plain prompt, pass chat_template, or use a "
                f"chat ('-Instruct') version of the model"
            )
        name = f"the chat template of {self.name}" if template is None else "the chat template that was given"
        return ChatTemplate(text, name, self.named)

    def end_of_turn(self) -> int | None:
        """The token that the chat template writes behind every answer.

        None where there is no template, or no such token, special or added to the vocabulary, stands there by itself.
        """
        if self._template is None:
            return None
        try:
            texts = [self.apply_chat_template(TALK[:count], add_generation_prompt=False) for count in (2, 3)]
        except PacelineError:  # a template that is broken, or rejects this conversation, says so where it is used
            return None
        first, second = (self._backend.encode(text.partition(ANSWER)[2], False) for text in texts)
        shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
        marks = [index for index in shared if self.token_text(index).strip()]
        return marks[0] if len(marks) == 1 and marks[0] in self._backend.added_ids() else None

    def tokens(self) -> Mapping[int, str]:
        """id -> token as the vocabulary spells it."""
        if self._tokens is None:
            self._tokens = {index: token for token, index in self._backend.vocabulary().items()}
        return self._tokens

    def fingerprint(self) -> str:
        """16 hex digits that are equal for equal vocabularies, whatever files they come from."""
        if self._fingerprint is None:
            lines = (f"{index} {token}" for index, token in sorted(self.tokens().items()))
            self._fingerprint = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self._fingerprint


def check_unicode(text: str) -> None:
    """Reject a text with half of a character.

    Raises:
        PromptError: it has a lone surrogate, which no tokenizer reads.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"the text is not valid Unicode (lone surrogate at character {error.start})") from None


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> str | None:
    """None if both have the same tokens at shared ids (sizes may differ), else the first difference in words."""
    if a is b:
        return None
    first, second = a.tokens(), b.tokens()
    shared = first.keys() & second.keys()
    if not shared:
        return f"{a.name} and {b.name} share no token ids"
    index = min((i for i in shared if first[i] != second[i]), default=None)
    if index is None:
        return None
    return f"token {index} is {first[index]!r} in {a.name} but {second[index]!r} in {b.name}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file.

    Raises:
        CheckpointError: unreadable, not JSON, not an object, or with a key given twice.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=keys_once(str(path)))
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        raise CheckpointError(f"{error}; correct the file, or download the checkpoint again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(value).__name__}; download the checkpoint again"
        )
    return value


def _read_inner(path: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}); download the checkpoint again") from error


def _of_marian(folder: Path) -> Tokenizer:
    """The tokenizer beside one of Marian's files, which says nothing of special tokens; a source ends with one."""
    from tokenizers.processors import TemplateProcessing

    path, end = folder / "tokenizer.json", MARIAN_TOKENS["eos_token"]
    if path.is_file():
        inner = _read_inner(path)
    else:
        path = _only_spm(folder)
        inner = _of_sentencepiece(path)
    if (index := inner.token_to_id(end)) is None:
        raise CheckpointError(f"{path} has no token {end}, with which sources end; replace it")
    _add_special_tokens(inner, MARIAN_TOKENS)
    inner.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, index)])
    return Tokenizer(FastBackend(inner), name=str(folder), named=MARIAN_TOKENS)


def _only_spm(folder: Path) -> Path:
    """The SentencePiece model of a folder."""
    found = sorted(folder.glob("*.spm"))
    if len(found) != 1:
        holds = ", ".join(path.name for path in found) or "neither"
        raise CheckpointError(
            f"{folder} must hold tokenizer.json or one SentencePiece model (.spm), with the vocabulary of both "
            f"languages, and holds {holds}; add one"
        )
    _need_sentencepiece(found[0])
    return found[0]


def _of_sentencepiece(path: Path) -> Any:
    """A `tokenizers.Tokenizer` that reads and writes as a SentencePiece model of the kind unigram."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    parts: Any = sentencepiece_model_pb2
    model = parts.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error}); download it again") from error
    trained, rules = model.trainer_spec, model.normalizer_spec
    if trained.model_type != trained.UNIGRAM:
        raise CheckpointError(f"{path} is a SentencePiece model of another kind than unigram; add its tokenizer.json")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    inner = Inner(models.Unigram(pieces, trained.unk_id, trained.byte_fallback))
    mapped = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    inner.normalizer = normalizers.Sequence([*mapped, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return inner


def _from_json(folder: Path) -> Tokenizer:
    inner = _read_inner(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    named = {name: text for name in NAMED_TOKENS if (text := _content(config.get(name))) is not None}
    template = _find_template(folder, config)
    try:
        _add_special_tokens(inner, config)
        inner.encode_special_tokens = bool(config.get("split_special_tokens", False))
        backend = FastBackend(inner, clean_up=bool(config.get("clean_up_tokenization_spaces", False)))
        return Tokenizer(backend, name=str(folder), named=named, template=template)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # tokens of the wrong kind, or no Unicode
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has unreadable tokens ({error}); download it again"
        ) from error


def _content(value: object) -> str | None:
    """The text of a token that a file gives as a string or as the dict of an added token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_special_tokens(inner: Any, config: Mapping[str, Any]) -> None:
    """Tokens that only the configuration knows to be special, or knows at all, join those of tokenizer.json."""
    from tokenizers import AddedToken

    known = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if (text := _content(entry)) is not None and text not in known:
            flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
            known[text] = AddedToken(text, special=bool(entry.get("special")), **flags)
            inner.add_tokens([known[text]])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [key for key in config if key.endswith("_token") and key not in NAMED_TOKENS]
    values = [config.get(key) for key in (*NAMED_TOKENS, *names)]
    values += list(extra.values() if isinstance(extra, Mapping) else extra)
    texts = [text for value in values if (text := _content(value)) is not None]
    inner.add_special_tokens([known.get(text) or AddedToken(text, special=True, normalized=False) for text in texts])


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own wins over the entry in tokenizer_config.json."""
    if (path := folder / "chat_template.jinja").is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download the checkpoint again") from error
    stored = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, Mapping)}
    if isinstance(stored, Mapping):
        stored = stored.get("default")
    if stored is not None and not isinstance(stored, str):
        raise CheckpointError(
            f"the chat template in {folder} must be a text, got {shortened(stored)}; download the checkpoint again"
        )
    return stored


def _check_sentencepiece(folder: Path) -> None:
    """Say what reading a SentencePiece model needs; transformers says it only by the way.

    Raises:
        CheckpointError: the folder has no other tokenizer, and a package is missing.
    """
    file = next((folder / name for name in SENTENCEPIECE if (folder / name).is_file()), None)
    if file is None or any((folder / name).is_file() for name in ("vocab.json", "vocab.txt", "tekken.json")):
        return
    with file.open("rb") as stream:
        begins = stream.read(1)  # the length of its first piece follows; tiktoken's files, of that name too, are text
    if begins == b"\n":
        _need_sentencepiece(file)


def _need_sentencepiece(file: Path) -> None:
    if absent := [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]:
        raise CheckpointError(
            f"the tokenizer in {str(file.parent)!r} is a SentencePiece model ({file.name}), which needs "
            f"{' and '.join(absent)}; pip install '.[sentencepiece]', or add its tokenizer.json"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _refuse_own_code(folder: Path, trust_remote_code: bool) -> None:
    """Raise CheckpointError where a tokenizer is Python code alone, as over tiktoken's files of Kimi's models."""
    own = not trust_remote_code and read_json(folder / "tokenizer_config.json").get("auto_map")
    if own and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"the tokenizer in {str(folder)!r} is Python code, which is not run unless you pass trust_remote_code=True "
            "(--trust-remote-code); or add a tokenizer.json, or pass tokenizer=FOLDER (--tokenizer FOLDER)"
        )


def _from_transformers(folder: Path, trust_remote_code: bool) -> Tokenizer:
    _check_sentencepiece(folder)
    _refuse_own_code(folder, trust_remote_code)
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a tokenizer class raises about its files
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"no tokenizer could be made from {str(folder)!r} ({reason}); pass tokenizer=FOLDER (--tokenizer FOLDER)"
        ) from error
    fast = getattr(inner, "backend_tokenizer", None)
    clean_up = bool(getattr(inner, "clean_up_tokenization_spaces", False))
    backend: TokenizerBackend = SlowBackend(inner) if fast is None else FastBackend(fast, clean_up=clean_up)
    named = {name: str(text) for name in NAMED_TOKENS if (text := getattr(inner, name, None))}
    template = _find_template(folder, {"chat_template": getattr(inner, "chat_template", None)})
    tokenizer = Tokenizer(backend, name=str(folder), named=named, template=template)
    # some classes make an empty tokenizer where their files are missing
    if tokenizer.vocab_size <= len(tokenizer.special_ids):
        raise CheckpointError(
            f"no tokenizer could be made from {str(folder)!r} (no vocabulary file); pass tokenizer=FOLDER "
            f"(--tokenizer FOLDER)"
        )
    return tokenizer
