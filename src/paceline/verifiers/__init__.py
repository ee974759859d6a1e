"""Which guesses stand; one file a rule."""
