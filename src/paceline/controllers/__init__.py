"""How much to guess; one file a policy; the measured cost model they share."""
