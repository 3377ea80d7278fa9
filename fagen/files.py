"""Files that others may read while they are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` in one step at the end, readable by everybody. Whoever reads
    `path` finds the old file or the whole new one; after an error the old one stays. Without `sync` a crash of the
    system may leave a part of it. Raises OSError."""
    # Beside the target, so that the rename at the end is one step.
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise
