"""Structured output. For texts that grow from left to right it is a rule on logits, by a library (`structured`), which
gets schemas as `library_schema` writes them, and whose numbers are made to end (`numbers`). For canvases with masked
slots, where no library serves: regular expressions, EBNF and JSON Schema as one kind of tree, their automata over the
tokens of a vocabulary, and the test whether a canvas can still become a text of a grammar.

From notation to that test: `notation` and `json_schema` read, `expression` holds what they read, `cfg` makes rules over
the `automaton`s of what is regular, `lexing` says what a vocabulary's tokens do to them, `emptiness` asks about a
canvas. From notation to the library: `notation` and `gbnf` read, `lexemes` cuts what they read into what the library's
lexer can tell apart, by `neighbours`, what may stand beside what.
Which tokens are tried is none of its business (`paceline.diffusion`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
