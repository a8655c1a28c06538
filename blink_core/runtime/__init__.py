"""Runs the scheduler: host memory, native thread, engine process (design sections 2 and 4)."""
