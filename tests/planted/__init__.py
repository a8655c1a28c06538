"""Planted faults: the shipped engine with one thing wrong, to show that certification notices (design section 9)."""
