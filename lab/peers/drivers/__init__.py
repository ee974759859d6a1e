"""The programs that run inside a peer's own environment, one file a peer, and what they share.

A request is one JSON line on standard input, its answer one on standard output. These files know nothing of Paceline:
they import only the standard library, NumPy and the peer's
packages.
"""
