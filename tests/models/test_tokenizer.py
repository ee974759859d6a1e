"""Tokenizers of checkpoints, and what each token writes, as bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
import transformers
from tiny_tokenizers import KINDS, write
from tokenizers import AddedToken
from transformers import AutoTokenizer

from paceline.checkpoints import Tokenizer, same_tokenizer, token_bytes
from paceline.config import StructuredOutputsParams
from paceline.errors import CheckpointError, ConfigError, PromptError
from paceline.grammar import constraint
from paceline.llm import BUNDLED

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "two\n\nlines\twith tabs",
    "don't stop, it's fine . ok ?",
    "größer 東京 🙂🚀 русский",
    "<s>special</s> inside <unk>",
    "",
    "   ",
    "größer 東京 don't <s>stop</s>  x\n" * 1000,
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.special_ids


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    assert_equal_to_transformers(folder)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_bundled_tokenizers_are_read_as_transformers_reads_them(name: str) -> None:
    assert_equal_to_transformers(BUNDLED / name)


CLASSES = [
    ("LlamaTokenizer", "metaspace", "llama"),
    ("GemmaTokenizer", "metaspace", "gemma2"),
    ("Qwen2Tokenizer", "byte_level", "qwen2"),
    ("GPT2Tokenizer", "byte_level", "gpt2"),
    ("T5Tokenizer", "unigram", "t5"),
    ("BertTokenizer", "wordpiece", "bert"),
]


@pytest.mark.parametrize(("name", "kind", "model_type"), CLASSES)
@pytest.mark.parametrize("start", [{}, {"add_bos_token": True}])
def test_folders_that_transformers_own_classes_write(
    tmp_path: Path, name: str, kind: str, model_type: str, start: dict[str, bool]
) -> None:
    content = json.loads((write(tmp_path / "parts", kind) / "tokenizer.json").read_text())["model"]
    pieces = content["vocab"] if isinstance(content["vocab"], dict) else [tuple(piece) for piece in content["vocab"]]
    options = {"merges": [tuple(merge) for merge in content["merges"]]} if content.get("merges") else {}
    made = getattr(transformers, name)(
        vocab=pieces, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options, **start
    )
    made.save_pretrained(str(tmp_path / "written"))
    (tmp_path / "written" / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_equal_to_transformers(tmp_path / "written")


def test_special_tokens_that_only_the_configuration_knows_are_added(tmp_path: Path) -> None:
    folder = write(tmp_path, "byte_level", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    assert_equal_to_transformers(folder)
    ours = Tokenizer.load(folder)
    assert ours.decode(ours.encode("<|im_start|>hello<|im_end|>")) == "hello"


def test_older_files_name_special_tokens_in_special_tokens_map(tmp_path: Path) -> None:
    folder = write(tmp_path, "metaspace")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    named = {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False}, "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    assert_equal_to_transformers(folder)
    assert Tokenizer.load(folder).bos_id == 1


def test_added_tokens_decoder_of_transformers_4_files(tmp_path: Path) -> None:
    entry = {
        "content": "<tool>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": False,
    }
    size = Tokenizer.load(write(tmp_path, "byte_level")).vocab_size
    folder = write(tmp_path, "byte_level", added_tokens_decoder={str(size): entry})
    assert_equal_to_transformers(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode("<tool>") == [size]
    assert ours.decode([size]) == "<tool>"


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "byte_level") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert len(Tokenizer.load(tmp_path).encode("hello world, how are you today?")) > 4


def test_clean_up_applies_to_wordpiece_but_not_to_bpe(tmp_path: Path) -> None:
    for kind in ("wordpiece", "byte_level"):
        assert_equal_to_transformers(write(tmp_path / kind, kind, clean_up_tokenization_spaces=True))


def test_a_folder_without_tokenizer_json_goes_to_transformers(tmp_path: Path) -> None:
    content = json.loads((write(tmp_path / "full", "byte_level") / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    names = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert_equal_to_transformers(folder)


@pytest.mark.parametrize("name", ["sentencepiece", "google.protobuf"])
def test_a_sentencepiece_model_says_what_it_needs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match=r"SentencePiece model \(tokenizer.model\), which needs ") as caught:
        Tokenizer.load(tmp_path)
    assert name in str(caught.value)
    assert "pip install '.[sentencepiece]'" in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's
    with pytest.raises(CheckpointError, match="no tokenizer could be made") as caught:
        Tokenizer.load(tmp_path)
    assert "sentencepiece]" not in str(caught.value)


def test_a_tokenizer_that_is_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\nIg== 1\n")
    own = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match="is Python code, which is not run unless you pass trust_remote"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer could be made"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [None, "LlamaTokenizer"])
def test_a_folder_with_a_sentencepiece_model_alone(tmp_path: Path, config: str | None) -> None:
    """Tokens are SentencePiece's own where no class of transformers changes them, and those of transformers."""
    library = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    (tmp_path / "corpus.txt").write_text("\n".join(tiny_tokenizers.CORPUS))
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, character_coverage=0.99, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": config}))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    own = library.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS[1:5]:
        assert ours.encode(text) == theirs.encode(text)
        if config is None:
            assert ours.encode(text, add_special_tokens=False) == own.encode(text)
            assert ours.decode(own.encode(text)) == text
    assert ours.vocab_size == own.vocab_size()


def test_loading_tokenizer_json_does_not_import_transformers() -> None:
    code = (
        "import sys; from paceline.checkpoints.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(BUNDLED / 'target')!r}).encode('hi'); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_token_text_keeps_the_leading_space(tmp_path: Path) -> None:
    for kind in ("byte_level", "metaspace"):
        ours = Tokenizer.load(write(tmp_path / kind, kind))
        pieces = [ours.token_text(i) for i in ours.encode("hello world", add_special_tokens=False)]
        assert "".join(pieces).strip() == "hello world"
        assert ours.token_text(10**6) == ""


def test_same_tokenizer_accepts_padding_and_names_the_first_difference(tmp_path: Path) -> None:
    first = Tokenizer.load(write(tmp_path / "a", "byte_level"))
    longer = Tokenizer.load(write(tmp_path / "b", "byte_level", additional_special_tokens=["<extra>"]))
    other = Tokenizer.load(write(tmp_path / "c", "metaspace"))
    assert same_tokenizer(first, longer) is None
    assert same_tokenizer(longer, first) is None
    why = same_tokenizer(first, other)
    assert why is not None
    assert "token 3 is '!'" in why
    assert "'<0x00>'" in why
    assert first.fingerprint() != longer.fingerprint() != other.fingerprint()
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    assert Tokenizer.load(tmp_path / "d").fingerprint() == first.fingerprint()


def test_missing_and_corrupt_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"none of tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = write(tmp_path / "half", "byte_level")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:500])
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.load(folder)
    write(folder, "byte_level")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        Tokenizer.load(folder)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(CheckpointError, match="no tokenizer could be made"):
        Tokenizer.load(tmp_path / "bad")


def test_prompts_that_are_no_text_are_rejected(tmp_path: Path) -> None:
    ours = Tokenizer.load(write(tmp_path, "byte_level"))
    with pytest.raises(PromptError, match="must be a string"):
        ours.encode(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(PromptError, match="not valid Unicode"):
        ours.encode("bad \ud800 text")


def test_no_chat_template_is_rejected_with_a_hint(tmp_path: Path) -> None:
    ours = Tokenizer.load(write(tmp_path, "byte_level"))
    assert not ours.has_chat_template
    with pytest.raises(ConfigError, match="has no chat template"):
        ours.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("where", ["config", "list", "jinja", "json"])
def test_the_default_template_is_found_wherever_checkpoints_keep_it(tmp_path: Path, where: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
    stored = {"config": {"chat_template": template}, "list": {"chat_template": named}}.get(
        where, {"chat_template": "no"}
    )
    folder = write(tmp_path, "byte_level", **stored)
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(template)
    if where == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>[user]hi"


TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: Tokenizer.load(tiny_tokenizers.write(folder / kind, kind)) for kind in tiny_tokenizers.KINDS}


def written(tokenizer: Tokenizer, text: str) -> bytes:
    table = token_bytes(tokenizer)
    return b"".join(table[token] or b"" for token in tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", [TEXT, "größer\n\n東京  🙂", " a\tb"])
def test_byte_level_tokens_write_the_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in (tokenizers["byte_level"], Tokenizer.load(BUNDLED / "target")):
        assert written(tokenizer, text) == text.encode()


LETTERS = ("für", "đem", "Ġmark")
"""Words whose signs all stand for bytes in byte-level vocabularies."""


def with_added(folder: Path, *words: str, special: str | None = None) -> Tokenizer:
    inner = tiny_tokenizers.byte_level()
    inner.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    if special is not None:
        inner.add_special_tokens([AddedToken(special, special=True, normalized=False)])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.load(folder)


def test_added_words_of_byte_level_vocabularies_write_their_letters(tmp_path: Path) -> None:
    ours = with_added(tmp_path, *LETTERS, special="<|über|>")
    for word in (*LETTERS, "<|über|>"):
        (index,) = ours.encode(word, add_special_tokens=False)
        ids = ours.encode(f"ein {word}{word} größer", add_special_tokens=False)
        assert ids.count(index) == 2
        assert ours.decode(ids, skip_special_tokens=False) == f"ein {word}{word} größer"
        assert ours.token_text(index) == word
        assert (token_bytes(ours)[index] == word.encode()) is (word in LETTERS)
    ids = ours.encode("a<|über|>ü", add_special_tokens=False)
    assert ours.decode(ids) == "aü"


def test_added_tokens_that_the_merges_make_of_text_stand_for_bytes(tmp_path: Path) -> None:
    r"""Marking the token of a line break ("\u010a") as added makes no letter of it."""
    ours = with_added(tmp_path, "Ċ", "Ġ", *LETTERS)
    text = "für\ndem \n đem"
    ids = ours.encode(text, add_special_tokens=False)
    assert {ours.encode("\n", add_special_tokens=False)[0], ours.encode("für", add_special_tokens=False)[0]} <= set(ids)
    assert ours.decode(ids) == text
    assert written(ours, text) == text.encode()


def test_words_of_an_output_that_must_be_one_of_several_may_be_added_ones(tmp_path: Path) -> None:
    ours = with_added(tmp_path, *LETTERS)
    rule = constraint(StructuredOutputsParams(choice=["ein für", "đem"]), ours, ours.vocab_size, [2])
    for text, fine in (("ein für", True), ("đem", True), ("Ġmark", False)):
        path = [*ours.encode(text, add_special_tokens=False), 2]
        assert (rule.allowed(path) == len(path)) is fine


@pytest.mark.parametrize("text", [TEXT, "größer 東京 🙂"])
def test_sentencepiece_tokens_write_the_text_behind_a_space(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert written(tokenizers["metaspace"], text) == b" " + text.encode()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_other_tokens_write_words_behind_spaces(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert written(tokenizers[kind], TEXT) == b" " + TEXT.encode()


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_special_tokens_write_nothing(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    table = token_bytes(tokenizers[kind])
    assert [table[index] for index in sorted(tokenizers[kind].special_ids)] == [None] * len(
        tokenizers[kind].special_ids
    )
    assert sum(one is not None for one in table) == len(tokenizers[kind].tokens()) - len(tokenizers[kind].special_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [50, 30_000])
def test_a_text_may_have_so_many_tokens(tokenizers: dict[str, Tokenizer], kind: str, count: int) -> None:
    tokenizer, text = tokenizers[kind], "a b " * count
    size = len(tokenizer.encode(text))
    assert tokenizer.encode(text, most=size) == tokenizer.encode(text)
    with pytest.raises(PromptError, match=f"the text has {size} tokens; at most {size - 1} are read"):
        tokenizer.encode(text, most=size - 1)


def test_a_conversation_may_have_so_many_tokens() -> None:
    tokenizer = Tokenizer.load(BUNDLED / "target")
    mark = tokenizer.token_text(min(tokenizer.special_ids))
    for content in ("a b " * 50, f"a {mark} " * 50, f"a {mark} " * 8000):  # a special token is text, read anew
        rendered = tokenizer.template().apply_tracked([{"role": "user", "content": content}])
        size = len(tokenizer.encode_rendered(rendered))
        assert len(tokenizer.encode_rendered(rendered, most=size)) == size
        with pytest.raises(PromptError, match=f"at most {size - 1} are read"):
            tokenizer.encode_rendered(rendered, most=size - 1)
