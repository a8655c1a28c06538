"""The compiled scheduler stepped by hand: front ends that write raw memory, a scripted model, checks after each call.

`harness.Harness` drives one scheduler and follows a ledger of what its front ends asked for and heard; `invariants`
and `cache_invariants` recount raw memory; `programs` draws whole programs. Independent of `verification.spec`.
"""
