"""Folders for kernels that are compiled through FAGEN_LAUNCHER.

nvcc hands the path of its source to its own parts, and a launcher such as sccache takes it for a part of what is asked:
it finds again only what was compiled at the same path. So such a kernel is compiled in `.launch/<artifact's name>/` of
the cache, the same for every build of it, and not in a folder whose name is new each time. The artifact's lock, which
whoever builds it holds, keeps others from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fagen import cache

_FOLDERS = ".launch"


@contextmanager
def linked(root: Path, name: str, link: Path) -> Iterator[None]:
    """Makes `link` lead to an empty folder for artifact `name`, removed at the end. Its lock must be held."""
    folder = root / _FOLDERS / name
    with suppress(FileNotFoundError):  # of a killed build, whose compiler may still write there and now does elsewhere
        folder.rename(link.with_name(f"{link.name}-left"))
    folder.mkdir(mode=0o755, parents=True)
    link.symlink_to(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settle(link: Path) -> None:
    """Puts the folder in the place of a link that leads to it: what was compiled there is its build's from now on."""
    if link.is_symlink():
        folder = link.resolve()
        link.unlink()
        folder.rename(link)


def sweep(root: Path) -> None:
    """Removes the folders that killed processes left under `root`."""
    with suppress(OSError):
        for folder in list((root / _FOLDERS).iterdir()):
            with cache.lock(root, folder.name, wait=False) as held:
                if held:
                    shutil.rmtree(folder, ignore_errors=True)
