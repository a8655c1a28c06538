"""How the check of batch invariance judges what it saw, and how it keeps to its time; needs no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil_rigs.gpu import batch_invariance
from hil_rigs.gpu.batch_invariance import NEW, Seen, company, compare, main, placed, probes


def seen(rounds: list[dict[int, bytes]]) -> Seen:
    """Rounds of probes, each with one row of logits at every position."""
    return Seen(
        [{probe: dict.fromkeys(range(NEW), row) for probe, row in some.items()} for some in rounds],
        [{probe: [1] * NEW for probe in some} for some in rounds],
    )


ALONE = seen([{0: b"a"}, {1: b"b"}, {2: b"c"}])


def test_equal_rows_pass() -> None:
    """Catches: a false alarm, and rows that are not counted."""
    assert compare("way", seen([{1: b"b", 2: b"c"}, {0: b"a"}]), ALONE) == (3 * NEW, [])


def test_differences_are_named() -> None:
    """Catches: one differing row, a lost row, other tokens or a probe without any row that pass as equal."""
    one = seen([{1: b"b"}])
    one.logits[0][1][3] = b"x"
    assert compare("way", one, ALONE)[1] == ["way, round 0: probe 1 differs in 1 rows from 3 on"]
    lost = seen([{2: b"c"}])
    del lost.logits[0][2][5]
    assert compare("way", lost, ALONE)[1] == [f"way, round 0: probe 2 has {NEW - 1} rows, alone {NEW}"]
    other = seen([{0: b"a"}])
    other.tokens[0][0][-1] = 2
    assert compare("way", other, ALONE)[1] == ["way, round 0: probe 0 has other tokens"]
    empty = seen([{0: b"a"}])
    empty.logits[0][0].clear()
    assert len(compare("way", empty, ALONE)[1]) == 1


def test_probes_stand_first_in_the_middle_and_last() -> None:
    """Catches: a batch whose rows all have their probes at one end, and probes that do not fit the model."""
    rng = np.random.default_rng(0)
    watched = probes(rng, 100, 512)
    order = [p.number for p in placed(watched, company(rng, 100, 6, 512))]
    assert order == [0, None, None, None, 1, None, None, None, 2]
    assert all(len(p.prompt) + NEW <= 512 and max(p.prompt) < 100 for p in watched)


FINE = {"wrong": [], "finished": True, "status": "", "seconds": 1.0}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each part finds, in place of its process; `ran` and `limits`: which were asked for, in order."""
    planned: dict[str, Any] = {"ran": [], "limits": []}

    def run_apart(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
        planned["ran"].append(part)
        planned["limits"].append(limit_s)
        return dict(planned.get(part, FINE))

    monkeypatch.setattr(batch_invariance, "run_apart", run_apart)
    return planned


ALL = ["cost", "engine dense bfloat16", "engine mixture bfloat16", "operations bfloat16"]


def test_the_cost_comes_first_and_every_part_is_asked_for(apart: dict[str, Any], tmp_path: Path) -> None:
    """Catches: a run whose time is over before the cost was measured, or that has no limit; a part left out."""
    arguments = ["--models", str(tmp_path), "--dtypes", "bfloat16", "--limit", "100"]
    assert main(arguments) == 0
    assert apart["ran"] == ALL
    assert all(0 < limit <= 100 for limit in apart["limits"])
    assert main([*arguments, "--limit", "0"]) == 2
    assert apart["ran"] == ALL  # nothing more


def test_a_run_goes_on_where_it_ended(
    apart: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: what was measured run again; a part that did not end, or found a difference, taken for done; what it
    found until then lost; results of other sources; the cost of two layers taken for that of the whole shape."""
    out = tmp_path / "out.json"
    arguments = ["--models", str(tmp_path), "--dtypes", "bfloat16", "--out", str(out)]
    apart[ALL[1]] = {"wrong": [], "finished": False, "status": "not over after 9 s", "seconds": 9.0, "rows": {"a": 7}}
    assert main(arguments) == 2
    told = capsys.readouterr().out
    assert "NOT FINISHED, not over after 9 s" in told
    assert '{"a": 7}' in told
    assert json.loads(out.read_text())["parts"][ALL[1]]["rows"] == {"a": 7}
    apart[ALL[1]] = FINE | {"wrong": ["way, round 0: probe 1 differs in 1 rows from 3 on"]}
    apart["ran"].clear()
    assert main(arguments) == 1
    assert apart["ran"] == [ALL[1]]
    assert "WRONG way, round 0" in capsys.readouterr().out
    apart[ALL[1]] = FINE
    apart["ran"].clear()
    assert main(arguments) == 0
    assert apart["ran"] == [ALL[1]]
    for other in (["--layers", "2"], ["--launch", "tail"]):
        apart["ran"].clear()
        assert main([*arguments, *other]) == 0
        assert apart["ran"] == ALL
    monkeypatch.setattr(batch_invariance, "digest", lambda: "other")
    apart["ran"].clear()
    assert main(arguments) == 0
    assert apart["ran"] == ALL


PART = """#!{python}
import json, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
part = sys.argv[sys.argv.index("--part") + 1]
if part != "silent":
    found = {{"rows": {{"prefix hits": 5}}, "wrong": []}}
    open(out, "w").write(json.dumps(found | ({{"finished": True}} if part == "ends" else {{}})))
if part in ("hangs", "silent"):
    time.sleep(600)
sys.exit(0 if part == "ends" else 3)
"""


def test_what_a_part_found_until_its_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a part that hangs and takes all the time, or with it what it had found; a crash taken for its end."""
    script = tmp_path / "python"
    script.write_text(PART.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    options = argparse.Namespace(launch="auto", layers=2, rounds=1)

    def run(part: str, limit_s: float) -> dict[str, Any]:
        found = batch_invariance.run_apart(part, options, limit_s)
        return {name: found.get(name) for name in ("rows", "finished", "status")}

    rows = {"prefix hits": 5}
    assert run("ends", 60.0) == {"rows": rows, "finished": True, "status": ""}
    assert run("crashes", 60.0) == {"rows": rows, "finished": False, "status": "exit status 3"}
    assert run("hangs", 4.0) == {"rows": rows, "finished": False, "status": "not over after 4 s"}
    assert run("silent", 0.5) == {"rows": None, "finished": False, "status": "not over after 0 s"}


def test_the_cost_is_a_ratio_of_medians() -> None:
    """Catches: a ratio upside down, or by one run that was disturbed; no ratio until all runs are there."""
    runs = [
        {"mode": mode, "rows": rows, "step_us": [us, us, 9 * us], "first_token_ms": us / 100}
        for mode, us in (("normal", 4000.0), ("invariant", 5000.0))
        for rows in batch_invariance.COST_BATCHES
    ]
    lines = batch_invariance.lines_of(FINE | {"runs": runs})
    assert lines[0] == "batch   1: step 4.000 -> 5.000 ms, ratio 1.250; first token 40.00 -> 50.00 ms, ratio 1.250"
    assert batch_invariance.lines_of(FINE | {"runs": runs[:3]}) == ["finished in 1.0 s, 0 wrong"]
