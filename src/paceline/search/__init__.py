"""Decoding by search: several branches of one text go on side by side, and a method says which are worth going on with.

A method is one module with a class (`Search`) that asks for rows of next-token probabilities and says in the end what
it found. It knows nothing of caches, batches and budgets: the driver (`run_searches`) scores the branches of all
searches in one pass, forks and frees their caches, and ends what has used up its budget. Branches are scored without
drafts. A method with passes of another kind, such as all candidates as one tree, or continuations of another model,
makes them with the runner itself, between two answers of the driver.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
