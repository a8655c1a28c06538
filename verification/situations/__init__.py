"""Situations that a run must reach (design section 9): `registry` names them, `observe` reads them from event logs,
`watch` follows the engines of a run."""
