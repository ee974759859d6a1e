"""Prompts that fill the middle of a text: the tokens by which families of models mark prefix, suffix and middle, and
the order in which they have learned to read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.checkpoints import Tokenizer
from paceline.serving.api_errors import ApiError


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Has the tokens of one spelling, as vocabularies write them.

    Attributes:
        prefix, suffix, middle: before the three parts; "" where the family has no mark of the middle.
        file, repository: before a file's name, and a repository's.
        ends: tokens that end an answer, where the vocabulary has them.
        suffix_first: the suffix stands before the prefix.
    """

    prefix: str
    suffix: str
    middle: str
    file: str = ""
    repository: str = ""
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


SPELLINGS: Final = (
    InfillMarks(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>"),
    ),
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>",
                ("<fim_pad>", "<|endoftext|>")),
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    InfillMarks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
    InfillMarks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    InfillMarks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",)),
    InfillMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)  # fmt: skip
"""Qwen's coders and CodeGemma; StarCoder and Granite; SantaCoder; Seed-Coder; GLM; DeepSeek-Coder; CodeLlama;
Codestral. A vocabulary is of the first spelling whose marks it has all.
"""


class InfillPrompts:
    """Writes prompts for one model.

    Args:
        tokenizer: of the model.
        name: of the model, for errors.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        ids = {text: index for index, text in tokenizer.tokens().items()}
        self._ids: Mapping[str, int] = ids
        self._marks = next((marks for marks in SPELLINGS if _complete(marks, ids)), None)

    @property
    def ends(self) -> list[int]:
        """Tokens with which the model ends what it fills in, beside its own end tokens."""
        marks = self._known()
        texts = (marks.prefix, marks.suffix, marks.middle, marks.file, marks.repository, *marks.ends)
        return sorted({self._ids[text] for text in texts if text in self._ids})

    def _known(self) -> InfillMarks:
        if self._marks is None:
            spelled = ", ".join(marks.prefix for marks in SPELLINGS)
            why = f"the model {self._name} has no tokens for infill (none of {spelled}); use /completion"
            raise ApiError(why, status=501, code="infill_not_supported")
        return self._marks

    def tokens(
        self,
        prefix: str,
        suffix: str,
        start: str = "",
        *,
        extra: Sequence[tuple[str, str]] = (),
        filename: str = "file",
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt. What the texts spell like special tokens is text.

        Args:
            start: of the middle, which the answer goes on from.
            extra: names and texts of other files, which stand before.
            filename: of this one, told where there are others.
            most: tokens that each text may have.
        Raises:
            ApiError: the model has no such tokens.
            PromptError: a text has too many tokens, or cannot be encoded.
        """
        marks = self._known()

        def read(text: str) -> list[int]:
            return self._tokenizer.encode_plain(text, most=most)

        ids, separated = list[int](), marks.file in self._ids
        if extra and marks.repository in self._ids and separated:
            ids += [self._ids[marks.repository], *read("project\n")]
        for name, text in extra:
            ids += [self._ids[marks.file], *read(f"{name}\n{text}")] if separated else read(f"{text}\n\n")
        if extra and separated:
            ids += [self._ids[marks.file], *read(f"{filename}\n")]
        parts = [[self._ids[marks.prefix], *read(prefix)], [self._ids[marks.suffix], *read(suffix)]]
        for part in reversed(parts) if marks.suffix_first else parts:
            ids += part
        ids += [self._ids[marks.middle]] if marks.middle else []
        return self._tokenizer.framed([*ids, *read(start)])


def _complete(marks: InfillMarks, ids: Mapping[str, int]) -> bool:
    return all(text in ids for text in (marks.prefix, marks.suffix, marks.middle) if text)
