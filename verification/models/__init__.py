"""Models built in code for verification: small, seeded, and shown to be sensitive (design section 9)."""

import verification.oracles  # noqa: F401  (sets the environment before transformers is imported)
