"""Blink: an LLM serving engine with no host CPU in its steady-state path (arXiv 2604.07609)."""

__version__ = "0.1.0"
