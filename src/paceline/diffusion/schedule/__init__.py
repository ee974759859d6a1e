"""Which slots may be written in a round: blocks of fixed, growing or held lengths, and what lies ahead of them."""
