"""Faults injected on a live rig (design section 9): the nemesis of the suite.

`model` says what a fault is, `processes`, `leases`, `rings` and `clients` are those of the local rig, `scenario` draws
and runs one with a control run, and `judge` decides from what was observed alone.
"""
