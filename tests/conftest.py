"""Fixtures of the whole suite: one kernel cache a session, and the marker `gpu`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fagen import render

# Machines are busy at times, and no test is about time.
settings.register_profile("fagen", deadline=None)
settings.load_profile("fagen")

CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")
    # Tests are of the tiles that ship, whatever was tuned in a cache that they are given.
    os.environ["FAGEN_TUNED"] = "0"
    # One cache for the session and all xdist workers, which inherit the variable: a variant is compiled once. Whoever
    # sets FAGEN_CACHE_DIR keeps the variants from session to session.
    if not hasattr(config, "workerinput") and not os.environ.get("FAGEN_CACHE_DIR"):
        config.stash[CACHE] = os.environ["FAGEN_CACHE_DIR"] = tempfile.mkdtemp(prefix="fagen-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)
        os.environ.pop("FAGEN_CACHE_DIR", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates, which this process renders from."""
    copy = tmp_path / "templates"
    shutil.copytree(render.template_dir(), copy)
    monkeypatch.setattr(render, "template_dir", lambda: copy)
    render.environment.cache_clear()
    yield copy
    render.environment.cache_clear()
