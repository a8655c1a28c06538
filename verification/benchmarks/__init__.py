"""Measurements that need the oracle or a rig: `python -m verification.benchmarks.decode`. They judge nothing."""
