"""Rigs: what a machine under test is made of, what is there now, and how Blink is started on it [design 1, 2].

This file imports nothing, so that `python3 -m hil_rigs.doctor` runs before anything is installed.
"""
