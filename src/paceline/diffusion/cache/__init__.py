"""What of a pass is kept for the next: nothing, finished blocks, the prefix, both sides, a window."""
