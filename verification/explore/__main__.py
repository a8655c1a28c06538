"""`python -m verification.explore`."""

from verification.explore.cli import explore_app

explore_app(prog_name="python -m verification.explore")
