"""Test and verification suite: oracles, criteria, properties, certificate (design section 9)."""
