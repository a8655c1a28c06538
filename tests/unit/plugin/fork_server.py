"""Runs pytest in forks of this process, one a request line on standard input; answers with the exit code.

Importing pytest, hypothesis, allure and matplotlib takes most of the time of a small pytest run; here it is paid once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

_LIMIT_S = 400


def preload() -> None:
    import allure_commons  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import matplotlib.backends.backend_svg  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401

    import verification.certificate.html
    import verification.certificate.report
    import verification.certificate.sign  # noqa: F401


def child(request: dict[str, Any]) -> int:
    import pytest

    signal.alarm(_LIMIT_S)  # nothing hangs: past the limit the fork dies, and the answer is its signal
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, empty), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path.insert(0, request["folder"])
    return int(pytest.main(request["arguments"]))


def main() -> None:
    sys.path.insert(0, os.getcwd())
    preload()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
