"""Recorded runs: a binary log file of an engine, its check against the specification, its replay and its conversion.

`format` is the file, `record` writes it from a live engine, `drawn` from a lock-step program; `monitor` steps the
specification over it, `replay` the compiled scheduler; `convert` makes JSON lines and Perfetto's trace events.
Documented in docs/trace.md (design sections 4, 9, 10).
"""
