"""The version of the package, for itself and for what is kept on disk."""

__version__ = "0.1.0"
