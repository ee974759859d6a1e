"""The token tree: structure, merging, choosing nodes under a budget."""
