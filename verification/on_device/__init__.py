"""Checks of an engine at sizes that a laptop cannot hold: layer shapes of large models, and ten thousand steps at once.

`python -m verification.on_device shapes` and `python -m verification.on_device long`; by default on rig `gpu`.
"""
