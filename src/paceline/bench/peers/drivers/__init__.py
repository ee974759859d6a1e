"""The programs that run inside a peer's own environment, one file a peer, and what they share.

In: one JSON line a request on standard input. Out: one JSON line an answer on standard output.
Not here: anything that needs Paceline itself; these files import only the standard library, NumPy and the peer's
packages.
"""
