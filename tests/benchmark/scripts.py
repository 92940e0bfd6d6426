"""Scripts of ``benchmarks/`` as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent


sys.path.append(str(ROOT / "benchmarks"))  # scripts import each other


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
