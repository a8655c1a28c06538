"""The fault corpus: public faults of other engines, each with the tests that realise it, or why none can."""

from verification.scenarios.corpus import Corpus, CorpusError, Row, load

__all__ = ["Corpus", "CorpusError", "Row", "load"]
