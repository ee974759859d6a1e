"""The command line: one file a verb; only this package prints."""
