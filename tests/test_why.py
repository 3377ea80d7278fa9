"""`fagen why`: which ingredient of its key keeps a kernel from being found; and what `fagen clean` lets go."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from pathlib import Path

import pytest
from fake_toolchain import FakeSpec, Stub, make_kernel, render
from hypothesis import given
from hypothesis import strategies as st

from fagen import build, cache, toolchain
from fagen.arch import resolve
from fagen.cli.amounts import parse_age, parse_size
from fagen.cli.artifacts import choose
from fagen.errors import SpecError
from fagen.why import explain

KERNEL = make_kernel()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("fagen.render.render", render)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    return stub


def ingredients(kernel: object) -> list[str]:
    (one,) = explain([kernel])  # type: ignore[list-item]
    assert not one.built
    return [difference.ingredient for difference in one.differences]


def test_nothing_is_built_and_nothing_used(nvcc: Stub) -> None:
    (one,) = explain([KERNEL])
    assert not one.built and one.nearest is None and nvcc.compiled == 0
    (artifact,) = build.build([KERNEL])
    os.utime(artifact.directory, (1, 1))
    (one,) = explain([KERNEL])
    assert one.built and one.directory == artifact.directory and one.digest == artifact.digest
    assert artifact.directory.stat().st_mtime == 1


def test_each_ingredient_is_named(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build([KERNEL])
    assert ingredients(dataclasses.replace(KERNEL, slug="fwd_b_sm90", spec=FakeSpec("b"))) == ["spec"]
    assert ingredients(dataclasses.replace(KERNEL, arch=resolve("sm80"))) == ["arch"]
    assert ingredients(dataclasses.replace(KERNEL, text="int y;")) == ["source"]
    with monkeypatch.context() as patch:
        flags = toolchain.NvccCompiler.flags
        patch.setattr(toolchain.NvccCompiler, "flags", lambda self, arch: (*flags(self, arch), "-G"))
        assert ingredients(KERNEL) == ["flags"]
    Stub(nvcc.path, version="13.1.2")
    assert ingredients(KERNEL) == ["compiler"]
    assert ingredients(dataclasses.replace(KERNEL, text="int y;")) == ["source", "compiler"]
    assert ingredients(dataclasses.replace(KERNEL, entry="fagen_bwd")) == []  # no other of its kind


def test_the_changed_line_is_shown(nvcc: Stub) -> None:
    build.build([dataclasses.replace(KERNEL, text="one\ntwo\nthree")])
    (one,) = explain([dataclasses.replace(KERNEL, text="one\n2\nthree")])
    (difference,) = one.differences
    assert (difference.built, difference.asked) == ("line 3: two", "line 3: 2")  # after the line of the renderer


def test_the_nearest_differs_least_and_was_used_last(nvcc: Stub) -> None:
    far = dataclasses.replace(KERNEL, spec=FakeSpec("b"), arch=resolve("sm80"), slug="far")
    near = [dataclasses.replace(KERNEL, spec=FakeSpec(name), slug=name) for name in "cd"]
    artifacts = build.build([far, *near])
    for artifact, used in zip(artifacts, (300, 200, 100), strict=True):
        os.utime(artifact.directory, (used, used))
    (one,) = explain([KERNEL])
    assert one.nearest is not None and one.nearest.slug == "c"


def test_what_cannot_be_read_is_said(nvcc: Stub) -> None:
    (artifact,) = build.build([KERNEL])
    artifact.binary.write_bytes(b"x" * artifact.size)
    (one,) = explain([KERNEL])
    assert not one.built and one.unreadable == ((artifact.directory, "kernel.cubin does not match its checksum"),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build.build([KERNEL])
    (one,) = explain([KERNEL])
    assert one.built and one.unreadable == ()
    shutil.copytree(artifact.directory, artifact.directory.with_name(f"{artifact.slug}-0123456789ab"))
    manifest = artifact.directory.with_name(f"{artifact.slug}-0123456789ab") / cache.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"format": {cache._FORMAT}', '"format": 1'))
    (one,) = explain([dataclasses.replace(KERNEL, text="int y;")])
    assert [problem for _, problem in one.unreadable] == [f"format 1, not {cache._FORMAT}"]


# What `fagen clean` lets go


ENTRIES = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**6)), max_size=12).map(
    lambda rows: [cache.Entry(Path(f"k-{i}"), None, "", used, size) for i, (used, size) in enumerate(rows)]
)


@given(ENTRIES, st.none() | st.floats(0, 1e6), st.none() | st.integers(0, 4 * 10**6))
def test_limits(entries: list[cache.Entry], age: float | None, room: int | None) -> None:
    """What stays is young enough and fits; nothing goes that is used later than something that stays, and no more than
    the limits ask for."""
    gone = choose(entries, age, room, 1e6)
    left = [entry for entry in entries if entry not in gone]
    if age is None and room is None:
        assert left == []
        return
    old = [entry for entry in entries if age is not None and 1e6 - entry.used > age]
    assert set(map(id, old)) <= set(map(id, gone))
    assert all(out.used <= kept.used for out in gone for kept in left)
    if room is not None:
        assert sum(entry.size for entry in left) <= room
    extra = sorted((entry for entry in gone if entry not in old), key=lambda entry: entry.used)
    if extra:
        assert room is not None and sum(entry.size for entry in [*left, extra[-1]]) > room


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30 d", 30 * 86400), ("2w", 14 * 86400), ("5min", 300)]
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age("--older-than", text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("512", 512), ("1K", 1024), ("1.5MiB", 1.5 * 2**20), ("2g", 2**31), ("3 GB", 3 * 2**30)],
)
def test_sizes(text: str, count: float) -> None:
    assert parse_size("--keep-size", text) == count


@pytest.mark.parametrize("text", ["", "d", "-1d", "1m", "1e3d", "nan", "inf", "٣d", "1d2h", "9" * 400 + "d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(SpecError, match=r"--older-than: .* is no age"):
        parse_age("--older-than", text)


@pytest.mark.parametrize("text", ["", "G", "-1", "1KK", "1X", "1iB", "nan", "1GiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SpecError, match=r"--keep-size: .* is no size"):
        parse_size("--keep-size", text)
