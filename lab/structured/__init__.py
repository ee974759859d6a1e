"""Structured outputs compared with other libraries: coverage of JSON schemas, time, and what constraints do to answers.

After JSONSchemaBench (arXiv:2501.10868). Every library, ours too, runs in a process of its own, where it may be ended.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
