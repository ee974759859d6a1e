"""The decoder's forward pass on the CPU as compiled code: vectors, tiles, matrices, attention, the pass, and who calls it."""
