"""The front end: OpenAI API, tokeniser and ring client (design section 8)."""
