"""Rows of the table of build cases from public bug reports that have no test beside the code they are about.

B1, B2 and B16 are also in test_toolchain.py, B1, B2, B6, B8, B10 and B13 to B16 in test_build.py, B8 and B10 to B12 in
test_cache.py, B13 in test_arch.py, B14 and B15 in test_ops.py, B6 and B15 in test_digest.py, B8 and B10 in
test_faults.py.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from fake_toolchain import FakeSpec, Stub, make_kernel, render, script, script_env
from strategies import FEATURES, TOGETHER

import fagen
from fagen import build, cache, target, toolchain
from fagen.arch import parse_list, resolve
from fagen.errors import SpecError, ToolchainError
from fagen.plan import plan
from fagen.spec import AttentionSpec, feature_names

WEIRD = "a b$HOME:c'é"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "c++", version="c++ (Test) 2", host=True)
    monkeypatch.setenv("FAGEN_CXX", str(stub.path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    return stub


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    return stub


def test_lengths_are_in_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6: calls of other lengths run the kernel of the first. A length in a tensor would have to be fetched from the
    device, which waits for it: that is refused, and no kernel is built for it."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path))
    attention = fagen.load(AttentionSpec(head_dim=8, varlen=True), arch="sm80", emulate=True)
    for rows in (5, 9, 12):
        x = torch.ones(rows, 1, 8, dtype=torch.bfloat16)
        begins = torch.tensor([0, 2, rows], dtype=torch.int32)
        packed = {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
        o = attention(x, x, x, **packed, max_seqlen_q=rows, max_seqlen_k=rows)
        assert torch.equal(o, x)
        with pytest.raises(SpecError, match=r"max_seqlen_q=.* must be an integer"):
            attention(x, x, x, **packed, max_seqlen_q=torch.tensor(rows), max_seqlen_k=rows)  # type: ignore[arg-type]
    assert len(cache.list_artifacts()) == 1


def test_without_a_home(tmp_path: Path) -> None:
    """B11: the cache is then a directory of the user's own in the temporary one, and is found there again."""
    stub = Stub(tmp_path / "bin" / "nvcc")
    code = (
        "cache._checkout = lambda: None; import os, pwd\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "(artifact,) = build.build(fake.kernels('a')); print(artifact.directory.parent, artifact.cached)\n"
    )
    environment = script_env(FAGEN_NVCC=str(stub.path), TMPDIR=str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    for cached in (False, True):
        done = subprocess.run(script(code), env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(tmp_path / f"fagen-{os.geteuid()}"), str(cached)]


def test_every_feature_under_a_strange_path(host: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12: with the real templates; every part of every path fits, and every name is another."""
    home = tmp_path / WEIRD / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(home))
    gradients = dict.fromkeys((*TOGETHER, "backward", "deterministic"), True)
    decoding = dict.fromkeys((*(name for name in FEATURES if name != "varlen"), "split_kv", "paged"), True)
    specs = [
        AttentionSpec(head_dim=256, head_dim_v=248, dtype="fp16", **features) for features in (gradients, decoding)
    ]
    assert {name for spec in specs for name in spec.features} == set(feature_names())
    wanted = [kernel for spec in specs for name in ("sm80", "sm90a", "9.0+PTX") for kernel in plan(spec, resolve(name))]
    artifacts = build.build(wanted, emulate=True)
    assert len({artifact.directory for artifact in artifacts}) == len(set(wanted)) == host.compiled
    for artifact in artifacts:
        assert artifact.directory.parent == home
        for path in artifact.directory.iterdir():
            assert all(len(part.encode()) <= 255 for part in path.parts)
    assert all(artifact.cached for artifact in build.build(wanted, emulate=True))


def test_architecture_lists(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B13: the very lists of the reports, as TORCH_CUDA_ARCH_LIST and as FAGEN_ARCH."""
    monkeypatch.setattr(target, "gpu_capability", lambda: None)
    meaning = {"9.0a": ["sm90a"], "8.0;9.0+PTX": ["sm80", "sm90", "sm90+ptx"], "8.0 9.0a": ["sm80", "sm90a"]}
    wrong = {"7.0;9.0": "'7.0'", "8.0a": "'8.0a'", "9": "'9'", "native": "'native' needs a GPU"}
    for variable, other in itertools.permutations(("TORCH_CUDA_ARCH_LIST", "FAGEN_ARCH")):
        monkeypatch.delenv(other, raising=False)
        for text, names in meaning.items():
            monkeypatch.setenv(variable, text)
            assert [arch.name for arch in target.default_archs()[0]] == names
        for text, message in wrong.items():
            monkeypatch.setenv(variable, text)
            with pytest.raises(SpecError, match=message):
                target.default_archs()
        monkeypatch.setenv(variable, "")  # as if it were not set
        assert [arch.name for arch in target.default_archs()[0]] == ["sm80"]
    with pytest.raises(SpecError, match="empty architecture list"):
        parse_list("")
    monkeypatch.setattr("fagen.render.render", render)
    with pytest.raises(ToolchainError, match="does not compile for sm120"):  # the stub knows 75 to 100
        build.build([make_kernel(slug="a"), make_kernel(slug="b", arch=resolve("sm120"))])
    assert nvcc.compiled == 0


def test_one_cache_two_architectures(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B14: 8.0, then 9.0, then 8.0 again: two entries, each found by its own."""
    monkeypatch.setattr("fagen.render.render", render)
    kernels = [make_kernel(arch=resolve(name)) for name in ("8.0", "9.0")]
    old, new = (build.build([kernel])[0] for kernel in kernels)
    assert (old.arch, new.arch) == ("sm80", "sm90") and old.directory != new.directory
    assert "-arch=sm_80" in old.log and "-arch=sm_90" in new.log
    assert [build.build([kernel])[0].directory for kernel in kernels] == [old.directory, new.directory]
    assert nvcc.compiled == 2


@pytest.mark.parametrize(("value", "jobs"), [("2", "2"), (None, "96"), ("0", None), ("abc", None)])
def test_96_processors_and_32_gb(
    value: str | None, jobs: str | None, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16: what ninja is started with. 32 GB are enough for 96 compilers of 300 MB; 3 GB are not."""
    monkeypatch.setattr("fagen.render.render", render)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(96)), raising=False)
    monkeypatch.setattr(build, "_available_memory", lambda: 32 * 10**9)
    said = tmp_path / "arguments"
    ninja = tmp_path / "ninja"
    ninja.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\nexit 1\n')
    ninja.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_ninja", lambda: ninja)
    many = [make_kernel(slug=f"k{index}", spec=FakeSpec(str(index))) for index in range(100)]
    if value is not None:
        monkeypatch.setenv("MAX_JOBS", value)
    if jobs is None:
        with pytest.raises(SpecError, match=f"MAX_JOBS='{value}'"):
            build.build(many)
        assert not said.exists()
        return
    for memory, expected in ((32 * 10**9, jobs), (3 * 10**9, str(min(int(jobs), 9)))):
        monkeypatch.setattr(build, "_available_memory", lambda memory=memory: memory)
        with pytest.raises(fagen.BuildError):
            build.build(many)
        arguments = said.read_text().split()
        assert arguments[arguments.index("-j") + 1] == expected


def test_the_order_of_specs_is_in_no_key(nvcc: Stub, tmp_path: Path) -> None:
    """B6: A, B and B, A in fresh processes with other hash seeds; real specs, compiled for the CPU by a stub."""
    stub = Stub(tmp_path / "c++", version="c++ (Test) 2", host=True)
    code = (
        "import json, sys; from fagen import build; from fagen.arch import resolve; from fagen.plan import plan\n"
        "from fagen.spec import AttentionSpec\n"
        "specs = [AttentionSpec(head_dim=64, causal=True), AttentionSpec(head_dim=64, softcap=True)]\n"
        "kernels = [k for s in specs[:: int(sys.argv[1])] for k in plan(s, resolve('sm80'))]\n"
        "print(json.dumps(sorted(a.directory.name for a in build.build(kernels, emulate=True))))\n"
    )
    said = set()
    for step, seed in (("1", "7"), ("-1", "8")):
        environment = script_env(FAGEN_CXX=str(stub.path), FAGEN_CACHE_DIR=str(tmp_path / "cpu"), PYTHONHASHSEED=seed)
        command = [*script("")[:2], code, step]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said.add(tuple(json.loads(done.stdout)))
    assert len(said) == 1 and stub.compiled == 2
