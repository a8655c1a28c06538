"""Lock-step: whole programs run in one native call on the compiled scheduler and, step by step, on the specification.

`programs` makes a program, `driver` turns it into words and runs it on the specification, `run.compare` runs the words
on the compiled scheduler and compares every observable after every call (design section 9).
"""
