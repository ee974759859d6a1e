"""Structured output: regular expressions, EBNF and JSON Schema as one kind of tree, their automata over the tokens of a
vocabulary, and the test whether a canvas with masked slots can still become a text of a grammar.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
