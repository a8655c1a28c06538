"""One-sided transports between a front end and the memory of its ring (design sections 2 and 3)."""
