"""The ring protocol with its memory orders in Promela, checked by Spin: `python -m verification.ring_model`.

Clause numbers are those of docs/rules.md. Reads neither the scheduler nor the front end: it is a model beside them.
"""
