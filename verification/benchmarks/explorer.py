"""The small-scope explorer on one core: transitions a second, `python -m verification.benchmarks.explorer`.

One transition is all that the search does for it: the state is restored, the compiled scheduler (or the modelled front
end, NIC, clock or host) makes its move, every clause is recounted from raw memory, the state is brought into canonical
form and hashed, looked up among all visited ones, and if new it is packed onto the frontier with its edge and parent.
Looking for deadlock and livelock afterwards, and re-expanding a sample of merged states, is not included. Seconds are
processor time of this process, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json

from verification.explore.run import explore
from verification.explore.scopes import of_profile

TARGET = 300_000  # transitions a second, issue 4


def measure(profile: str, symmetry: bool) -> list[dict[str, float | str]]:
    """Searches every scope of a profile. Raises AssertionError for one that does not hold."""
    figures: list[dict[str, float | str]] = []
    for scope in of_profile(profile):
        search = explore(scope, symmetry=symmetry)
        assert search.holds, f"{scope.name}: {search.clause} {search.message} {search.stopped_by}"
        figures.append(
            {
                "scope": scope.name,
                "states": search.figures["states"],
                "transitions": search.figures["transitions"],
                "cpu_s": search.cpu_seconds,
                "transitions_per_s": search.rate,
            }
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="smoke", choices=("smoke", "nightly", "full"))
    parser.add_argument("--plain", action="store_true", help="without symmetry reduction")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = measure(chosen.profile, not chosen.plain)
    total = sum(float(f["transitions"]) for f in figures) / sum(float(f["cpu_s"]) for f in figures)
    if chosen.json:
        print(json.dumps({"scopes": figures, "transitions_per_s": total, "target": TARGET}))
        return
    for f in figures:
        print(
            f"{f['scope']:46} {f['states']:>10,} states {f['transitions']:>11,} transitions "
            f"{f['cpu_s']:6.2f} s  {f['transitions_per_s']:>11,.0f} transitions/s"
        )
    print(f"all: {total:,.0f} transitions/s (target {TARGET:,}: {'met' if total >= TARGET else 'NOT met'})")


if __name__ == "__main__":
    main()
