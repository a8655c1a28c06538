"""Settings shared by every test: Hypothesis draws the same examples in every run, so that a red run can be repeated."""

from hypothesis import settings

settings.register_profile("blink-derandomised", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("blink-derandomised")
