"""How the models that ship with Paceline are made, and how published accelerators are trained; run from the root of the
repository, as `python -m recipes.bundled_pair.train`. What the package itself needs at run time is not here.
"""
