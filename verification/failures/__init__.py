"""Failures that explain themselves: bundles, signatures, triage and known issues (design sections 9 and 10)."""
