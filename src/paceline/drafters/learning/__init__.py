"""Drafters that learn from the requests that they draft for: Online Speculative Decoding (OSD).

1. Serve. Where a drafter's token was rejected, the target's likeliest tokens there are kept, with the text and the
   states that the drafter read (`records`), in memory, for the request's tenant alone.
2. Train. After `interval` requests a process of its own (`paceline.training.online`) takes `steps` gradient steps,
   each on one request: the trainer's own loss at the rejected positions, whose targets are what was kept, forward KL
   for most methods.
3. Replay. Base, current version and candidate draft the newest requests, which were not learned; the best one drafts
   for requests that begin from then on. Those that run keep theirs, whose caches fit no other.
4. Compare. At first every second request still begins with the version before. Where fewer drafts of the new one are
   accepted, by more than chance, it is taken back at once.

Drafts are verified as ever: whatever is learned, tokens and distributions are the target's.

Source: Online Speculative Decoding (arXiv:2310.07177).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
