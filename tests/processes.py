"""Where the processes that tests start find what they import."""

from __future__ import annotations

import os
from pathlib import Path

# As it was when the tests were collected, whatever folder one of them changes to.
CALLERS = [Path(path).absolute() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def python_path(*folders: Path) -> str:
    """A PYTHONPATH in which `folders` stand before that of the caller, by which dependencies may come."""
    return os.pathsep.join(map(str, [*folders, *CALLERS]))
