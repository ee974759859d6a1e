"""Texts of models as thoughts, content and function calls, and back; and the grammar of an answer in which calls may
come. What is known about a family of models is in its module alone, as a `ToolFormat` of `base`; `formats` is the table
of them. The modules know nothing of HTTP or of how a text comes to be.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
