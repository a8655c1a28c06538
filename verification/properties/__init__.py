"""The properties: pure checkers over histories, event logs and memory snapshots.

Each module names its clauses; `verification/suite` runs programs on a rig and hands what was recorded to these.
"""
