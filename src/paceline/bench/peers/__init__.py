"""Other engines on the same weights and prompts, each driven in an environment of its own.

In: a peer's name, a checkpoint folder, prompts as token ids. Out: `PeerRun`s, greedy.
Not here: measuring and comparing speeds (paceline.bench), printing.

    peers.names()
    with peers.open("llama.cpp", folder, dtype="float16", threads=2, options={"method": "ngram"}) as peer:
        run = peer.generate([1, 2, 3], max_tokens=64)
"""

from paceline.bench.peers.agreement import Agreement, agreement
from paceline.bench.peers.catalog import PEERS, PeerEntry, names
from paceline.bench.peers.peer import Peer, PeerRun, open_peer
from paceline.bench.peers.process import PeerError

open = open_peer

__all__ = ["PEERS", "Agreement", "Peer", "PeerEntry", "PeerError", "PeerRun", "agreement", "names", "open", "open_peer"]
