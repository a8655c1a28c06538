"""Outcomes, report, verdict, signature and verification of a run (design section 9)."""
