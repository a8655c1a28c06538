"""Linearisability of what one ring's clients saw: operations, sequential specification, search, witness and picture.

`check.check(history)` decides; `recorded.operations_of(history)` reads a recorded run; `picture.draw` shows it.
"""
