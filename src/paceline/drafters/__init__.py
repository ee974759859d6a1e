"""Where guesses come from; one file a method."""
