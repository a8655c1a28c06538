"""Checks and timings of the engine's GPU code on a machine that has one."""
