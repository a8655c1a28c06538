"""Small scopes, exhaustively, on the compiled scheduler (design section 9; docs/explore.md)."""
