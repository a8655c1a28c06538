"""Executable specification of ring, scheduler and KV cache: plain Python over lists and ints (design section 9).

Written from the design and `docs/rules.md`, whose clause numbers (T1, R6, K4, ...) stand beside the code; it imports
nothing but `blink_core.abi`. `Machine` is the model, `Machine.poll` and `Machine.boundary` its two calls.
"""
