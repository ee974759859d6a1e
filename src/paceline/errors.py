"""The hierarchy of errors that a user can cause and fix.

    PacelineError                 one clear line: what was wrong, what was found, what to do
    |-- ConfigError               an argument, flag or configuration key
    |-- PromptError               a prompt: empty, too long, token ids out of range
    |-- CheckpointError           a folder or hub id that cannot be loaded
    |   |-- UnsupportedModelError   an architecture or weight format that is not supported
    |   `-- OutOfMemoryError        the model would not fit; checked before anything is loaded
    |-- CapabilityError           a method needs what this runner cannot do
    |-- DrafterError              a drafter that cannot serve this target, or broke its contract
    |-- NumericsError             NaN or infinite logits from the model
    `-- UnsatisfiableError        a grammar, regular expression or schema that no text can meet

This module imports nothing. The command line prints `str(error)` on one line and exits with code 2;
a traceback that reaches a user is a bug of ours.
"""


class PacelineError(Exception):
    """Base of all errors that a user can fix; its text tells what was wrong, what was found and what to do."""


class ConfigError(PacelineError, ValueError):
    """An argument, a command-line flag or a configuration key is wrong."""


class PromptError(PacelineError, ValueError):
    """A prompt cannot be decoded: empty, longer than the context, or with token ids out of range."""


class CheckpointError(PacelineError, OSError):
    """A checkpoint is missing, incomplete or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """An architecture, quantisation or file format that is not supported."""


class OutOfMemoryError(CheckpointError, MemoryError):
    """The model and its cache would not fit into memory; raised before weights are read."""


class CapabilityError(PacelineError):
    """A method needs something that the runner does not declare in its capabilities."""


class DrafterError(PacelineError):
    """A drafter does not work with this target (e.g. another tokenizer), or proposed something invalid."""


class NumericsError(PacelineError, ArithmeticError):
    """The model returned NaN or +infinity where a distribution was expected."""


class UnsatisfiableError(PacelineError, ValueError):
    """A constraint (grammar, regular expression, schema) that no text meets, or none in the slots that are left."""
