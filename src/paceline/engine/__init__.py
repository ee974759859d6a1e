"""The loop: requests, scheduling, stops, statistics, the step.

It knows no method by name and no model: drafters, verifiers, controllers and runners are told it through their
protocols. It prints nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
