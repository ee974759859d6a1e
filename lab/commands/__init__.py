"""The commands of `python -m lab`, one module each; only this package prints."""
