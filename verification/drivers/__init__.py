"""Drivers run a drawn program on a rig and record its history; they decide nothing."""
