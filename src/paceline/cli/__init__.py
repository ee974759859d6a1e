"""The command line: one module per command, and what several of them use.

Only this package prints. It measures and decodes nothing itself: what a command works out comes from `paceline.bench`
or `paceline.llm`. `main` is the entry, and ends the process on Ctrl-C while the rest is imported; `app` holds the table
of commands and turns whatever ends one into a line and an exit code. Shared are `options` (flags made from the fields
of the configuration classes), `prompts` (what is read), `outputs` (files that are written) and `terminal` (wrapped
text, log records, progress).
"""
