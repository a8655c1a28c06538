"""Situations that a run should reach, else its report warns (design section 9): `registry` names them, `observe` reads
them from event logs, `watch` follows the engines of a run."""
