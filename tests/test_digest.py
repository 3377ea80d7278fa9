"""The key of an artifact is a pure function of spec, templates, flags, architecture and the compiler's identity: each
changes it, and nothing else does."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_toolchain import ROOT, Stub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import python_path
from strategies import archs, specs

from fagen import build, cache, toolchain
from fagen.arch import Arch, resolve
from fagen.plan import plan
from fagen.spec import AttentionSpec

WORDS = st.text(max_size=8)
INGREDIENTS = st.tuples(WORDS, st.lists(WORDS, max_size=3), WORDS, WORDS)
SM90 = resolve("sm90")
RICH = AttentionSpec(head_dim=64, causal=True, softcap=True, alibi=True)

slow = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def nvcc(tmp_path_factory: pytest.TempPathFactory) -> toolchain.NvccCompiler:
    return toolchain._nvcc_at(Stub(tmp_path_factory.mktemp("toolkit") / "nvcc").path, "test")


def digests(spec: AttentionSpec, arch: Arch, compiler: toolchain.Compiler, emulate: bool = False) -> tuple[str, ...]:
    return tuple(build.request_of(kernel, compiler, emulate).digest for kernel in plan(spec, arch))


# Any of them changes it


@given(INGREDIENTS, INGREDIENTS)
def test_equal_keys_have_equal_ingredients(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    """Also where text moves from one ingredient to its neighbour."""
    assert (cache.digest(*one) == cache.digest(*other)) == (one == other)


@given(INGREDIENTS, st.data())
def test_one_changed_ingredient_changes_the_key(one: tuple, data: st.DataObject) -> None:  # type: ignore[type-arg]
    index = data.draw(st.integers(0, 3))
    changed = data.draw(INGREDIENTS.filter(lambda other: other[index] != one[index]))[index]
    other = (*one[:index], changed, *one[index + 1 :])
    assert cache.digest(*one) != cache.digest(*other)


@slow
@given(specs(), specs(), archs(), archs())
def test_kernels_that_differ_in_spec_or_architecture_have_other_keys(
    nvcc: toolchain.NvccCompiler, one: AttentionSpec, other: AttentionSpec, here: Arch, there: Arch
) -> None:
    """For the card and for the CPU. Specs may share a kernel that knows nothing of what they differ in."""
    keys: dict[tuple[object, ...], str] = {}
    for spec, arch, emulate in itertools.product((one, other), (here, there), (False, True)):
        for kernel, key in zip(plan(spec, arch), digests(spec, arch, nvcc, emulate), strict=True):
            assert keys.setdefault((kernel.kind, kernel.spec, arch, emulate), key) == key
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("emulate", [False, True])
def test_another_compiler_or_other_flags_change_it(
    emulate: bool, nvcc: toolchain.NvccCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(RICH, SM90, nvcc, emulate)
    newer = toolchain._nvcc_at(Stub(tmp_path / "nvcc", version="13.0.89").path, "test")
    assert set(before).isdisjoint(digests(RICH, SM90, newer, emulate))
    flags = toolchain.NvccCompiler.flags
    monkeypatch.setattr(toolchain.NvccCompiler, "flags", lambda self, arch: (*flags(self, arch), "-lineinfo"))
    assert set(before).isdisjoint(digests(RICH, SM90, nvcc, emulate))


@pytest.mark.parametrize(
    ("name", "emulate"),
    [("kernel.j2", False), ("common/row_end.cuh.j2", False), ("ptx/mma.cuh", False), ("emulate/global.hpp", True)],
)
@pytest.mark.parametrize("same_time", [False, True])
def test_an_edited_template_changes_it_and_its_return_restores_it(
    name: str, emulate: bool, same_time: bool, nvcc: toolchain.NvccCompiler, templates: Path
) -> None:
    """B15, whatever the times of the files say: some tools keep them, and a clock can go backwards."""
    path = templates / name
    text, times = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    before = digests(RICH, SM90, nvcc, emulate)

    def write(content: str) -> None:
        path.write_text(content)
        if same_time:
            os.utime(path, ns=times)

    line = next(line for line in text.splitlines() if line.startswith("//") or line.endswith(";"))
    write(text.replace(line, line.replace(" ", "  ", 1), 1))  # also a change of white space is one
    edited = digests(RICH, SM90, nvcc, emulate)
    assert edited != before
    write(text)
    assert digests(RICH, SM90, nvcc, emulate) == before
    os.utime(path, (1, 1))
    assert digests(RICH, SM90, nvcc, emulate) == before


# Nothing else does


@slow
@given(spec=specs(), arch=archs(), emulate=st.booleans(), data=st.data())
def test_what_is_no_ingredient_does_not_change_it(
    spec: AttentionSpec,
    arch: Arch,
    emulate: bool,
    data: st.DataObject,
    nvcc: toolchain.NvccCompiler,
    tmp_path: Path,
) -> None:
    """Neither time nor path nor environment, nor what was rendered or built before."""
    before = digests(spec, arch, nvcc, emulate)
    other = data.draw(specs())
    with pytest.MonkeyPatch.context() as patch:
        variables = list(os.environ.items())
        random.Random(data.draw(st.integers())).shuffle(variables)
        patch.setattr(os, "environ", dict(variables))
        for name in ("HOME", "TZ", "LANG", "FAGEN_CACHE_DIR", "TMPDIR", "USER", "SOURCE_DATE_EPOCH"):
            patch.setitem(os.environ, name, str(tmp_path / data.draw(st.sampled_from(["a", "b c", "é"]))))
        now = data.draw(st.floats(0, 4e9))
        patch.setattr(time, "time", lambda: now)
        patch.chdir(tmp_path)
        moved = toolchain._nvcc_at(Stub(tmp_path / "moved" / "nvcc").path, "test")
        digests(other, arch, nvcc, emulate)
        assert digests(spec, arch, moved, emulate) == before


def test_it_is_the_same_in_another_process_and_another_installation(
    nvcc: toolchain.NvccCompiler, tmp_path: Path
) -> None:
    """B6: a copy of the package elsewhere, with other times, hash seeds, variables and working directories."""
    copy = tmp_path / "else where" / "é"
    for name in ("fagen", "templates"):
        shutil.copytree(
            ROOT / name, copy / name, copy_function=shutil.copy, ignore=shutil.ignore_patterns("__pycache__")
        )
    code = (
        "import json, sys; from pathlib import Path; from fagen import build, toolchain\n"
        "from fagen.arch import resolve; from fagen.plan import plan; from fagen.spec import AttentionSpec\n"
        "compiler = toolchain._nvcc_at(Path(sys.argv[1]), 'test')\n"
        "wanted = [(AttentionSpec(**json.loads(text)), arch) for text, arch in json.loads(sys.argv[2])]\n"
        "print(json.dumps([build.request_of(kernel, compiler, emulate).digest for spec, arch in wanted\n"
        "    for kernel in plan(spec, resolve(arch)) for emulate in (False, True)]))\n"
    )
    wanted = [
        (spec.model_dump_json(), arch)
        for spec in (RICH, AttentionSpec(head_dim=72, backward=True), AttentionSpec(head_dim=128, split_kv=True))
        for arch in ("sm80", "sm90a")
    ]
    answers = set()
    for home, seed in ((ROOT, "1"), (copy, "2")):
        kept = [(name, value) for name, value in os.environ.items() if not name.startswith(("FAGEN_", "PYTHON"))]
        environment = dict(kept if home == ROOT else kept[::-1]) | {
            "PYTHONPATH": python_path(home),
            "PYTHONHASHSEED": seed,
            "HOME": str(tmp_path),
            "TZ": f"UTC{seed}",
        }
        command = [sys.executable, "-c", code, str(nvcc.executable), json.dumps(wanted)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    assert len(answers) == 1 and len(json.loads(answers.pop())) > 12
