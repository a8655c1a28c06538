"""Mutants: seeded faults of the product that show what the checkers notice (design section 9).

Each is a declaration in `registry/*.yaml`: a text of one product file and what stands there instead. The product's
sources hold nothing of them. `model` loads and applies them, `weave` builds one native module with all native ones
behind a run-time number, `hook` replaces text of Python modules as they are imported, `matrix` runs mutants against
checkers, `automatic` draws further ones by operators.
"""
