"""First on the path of child processes with a mutant: puts it in force before anything of the product is imported."""

import importlib.util
import os
import sys
from pathlib import Path


def _others() -> None:
    """Runs the sitecustomize that this one stands before, if there is one."""
    here = Path(__file__).resolve()
    for folder in sys.path:
        other = Path(folder or ".", "sitecustomize.py").resolve()
        if other.is_file() and other != here:
            exec(compile(other.read_bytes(), str(other), "exec"), {"__name__": "sitecustomize", "__file__": str(other)})
            return


def _install(variable: str, hook: str, function: str) -> None:
    """Calls `function` of the file that `hook` names: `verification` itself may not be importable yet."""
    if not os.environ.get(variable):
        return
    path = os.environ[hook]
    spec = importlib.util.spec_from_file_location(f"_{hook.lower()}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    getattr(module, function)()


_others()
try:
    _install("BLINK_PYTHON_MUTANT", "BLINK_MUTANT_HOOK", "install")
    _install("BLINK_NATIVE_MUTANT", "BLINK_NATIVE_MUTANT_HOOK", "install_from_environment")
except BaseException as error:  # the interpreter would go on without the mutant
    print(f"mutant not in force: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(70)
