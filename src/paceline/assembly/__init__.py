"""Builds an engine from names and options: the methods, verifiers and controllers of a `speculative_config`, models
beside the target, and the self-test of exactness.

The only place that knows both the names of the registry and the parts of an engine. It decodes nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
