"""`fagen.load` as its users meet it: what a call may not be, what is built once, and what is built again."""

from __future__ import annotations

import copy
import ctypes
import enum
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import fagen
from fagen import build, kernels, launch, ops, reference
from fagen.arch import resolve
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.errors import CacheError, LaunchError, SpecError
from fagen.plan import plan as plans
from fagen.spec import AttentionSpec
from fagen.tensor_map import TensorMap

PLAIN = AttentionSpec(head_dim=16)
FULL = AttentionSpec(head_dim=16, window=True, softcap=True, alibi=True, dropout=True)
VALUES: dict[str, Any] = {
    "window": (3, 2),
    "softcap": 5.0,
    "alibi_slopes": torch.tensor([0.25, 0.5]),
    "dropout_p": 0.1,
    "seed": 1,
}


def tensors(seqlen: int = 9, heads: int = 2, heads_k: int = 1, dim: int = 16, seed: int = 0) -> list[Tensor]:
    """q, k, v: unit normal, bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, seqlen, heads, dim), (1, seqlen, heads_k, dim), (1, seqlen, heads_k, dim)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.fixture(scope="module")
def plain() -> fagen.Attention:
    return fagen.load(PLAIN, arch="sm80", emulate=True)


@pytest.fixture(scope="module")
def full() -> fagen.Attention:
    return fagen.load(FULL, arch="sm80", emulate=True)


def replaced(index: int, make: Callable[[Tensor], Any]) -> list[Any]:
    """q, k, v with one of them made anew."""
    made: list[Any] = list(tensors())
    made[index] = make(made[index])
    return made


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (replaced(0, Tensor.half), r"q has dtype torch\.float16; the spec's dtype is bf16 \(torch\.bfloat16\)"),
        (replaced(2, Tensor.float), r"v has dtype torch\.float32; the spec's dtype is bf16"),
        (replaced(1, lambda x: x.to("meta")), "k is on meta, q on cpu; all tensors must be on one device"),
        (replaced(0, lambda x: x.to("meta")), "k is on cpu, q on meta; all tensors must be on one device"),
        (
            replaced(0, lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)),
            r"q has stride 18 .*must be contiguous: pass q\.contiguous\(\)",
        ),
        (replaced(1, lambda x: x[..., :1].expand(-1, -1, -1, 16)), r"k has stride 0 .*pass k\.contiguous\(\)"),
        (tensors(heads=3, heads_k=2), "3 query heads over 2 key heads: the first must be a multiple of the second"),
        (tensors(heads_k=0), "2 query heads over 0 key heads"),
        (tensors(dim=24), "q has head dim 24; the spec's is 16"),
        (replaced(2, lambda x: x[..., :8]), "v has head dim 8; the spec's is 16"),
        (replaced(0, lambda x: x[0]), r"q has 3 dimensions; expected \(batch, seqlen, heads, head_dim\)"),
        (replaced(1, lambda x: x.expand(2, -1, -1, -1)), "batches of 1, 2 and 1; they must be equal"),
        (replaced(2, lambda x: x[:, :5]), r"k is \(1, 9, 1\) and v \(1, 5, 1\)"),
        (
            replaced(2, lambda x: x.requires_grad_()),
            r"computes none: AttentionSpec\(\.\.\., backward=True\), or call under torch\.no_grad\(\)",
        ),
        (replaced(1, lambda x: x.tolist()), "k must be a tensor, got list"),
        (replaced(0, lambda x: x[:, :1].expand(-1, 2**30, -1, -1)), "q has 1073741824 positions; at most"),
    ],
)
def test_tensors_that_do_not_fit(plain: fagen.Attention, inputs: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        plain(*inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_a_value_without_its_feature(plain: fagen.Attention, name: str, value: Any) -> None:
    feature = {"alibi_slopes": "alibi", "dropout_p": "dropout", "seed": "dropout"}.get(name, name)
    with pytest.raises(SpecError, match=rf"{name} is given, .*AttentionSpec\(\.\.\., {feature}=True\)"):
        plain(*tensors(), **{name: value})


@pytest.mark.parametrize("name", [name for name in VALUES if name != "seed"])
def test_a_feature_without_its_value(full: fagen.Attention, name: str) -> None:
    with pytest.raises(SpecError, match=rf"the spec has \w+=True: pass {name}=\.\.\."):
        full(*tensors(), **{key: value for key, value in VALUES.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("softmax_scale", value, "softmax_scale must be a") for value in (0.0, -1.0, float("nan"), "0.1", True)),
        *(("softcap", value, "softcap must be a") for value in (0.0, -5.0, float("inf"), True, torch.tensor(5.0))),
        *(("dropout_p", p, r"dropout_p=.* must be .*at least 0 and below 1") for p in (1.0, -0.1, 2, "0.1", True)),
        *(
            ("seed", seed, "seed=.* must be an integer that fits in 64 bits")
            for seed in (2**64, -(2**63) - 1, 0.5, True)
        ),
        *(
            ("window", w, r"window=.*: expected \(left, right\)")
            for w in ((-2, 0), (0, -5), (1,), (1, 2, 3), (1.0, 1), 5)
        ),
        ("alibi_slopes", 0.5, "alibi_slopes must be a float32 tensor, got float"),
        ("alibi_slopes", torch.ones(3), r"alibi_slopes has shape \(3,\); expected \(2,\) or \(1, 2\)"),
        ("alibi_slopes", torch.ones(2).double(), r"alibi_slopes has dtype torch\.float64; expected torch\.float32"),
        ("alibi_slopes", torch.ones(2, device="meta"), "alibi_slopes is on meta, q on cpu"),
        ("soft_cap", 5.0, "a call takes no argument soft_cap"),
        ("causal", True, r"a call takes no argument causal; the spec says that: AttentionSpec\(\.\.\., causal="),
    ],
)
def test_values_that_mean_nothing(full: fagen.Attention, name: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        full(*tensors(), **(VALUES | {name: value}))
    assert "\n" not in str(caught.value)


def test_values_that_mean_off_need_no_feature(plain: fagen.Attention) -> None:
    expected = plain(*tensors())
    assert torch.equal(plain(*tensors(), window=(-1, -1), dropout_p=0.0, softcap=None), expected)


def test_inputs_that_require_a_gradient_are_taken_without_autograd(plain: fagen.Attention) -> None:
    q, k, v = tensors()
    expected = plain(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        assert torch.equal(plain(q, k, v), expected)
    with torch.inference_mode():
        assert torch.equal(plain(q, k, v), expected)


def test_results(full: fagen.Attention) -> None:
    """o alone or with lse, in the shapes and types that the docstring names, and right."""
    q, k, v = tensors(seqlen=40)
    o = full(q, k, v, **VALUES)
    assert isinstance(o, Tensor) and o.shape == q.shape and o.dtype == q.dtype and o.is_contiguous()
    again, lse = full(q, k, v, return_lse=True, **VALUES)
    assert torch.equal(again, o) and lse.shape == (1, 2, 40) and lse.dtype == torch.float32
    expected_o, expected_lse = reference.attention(q, k, v, **VALUES)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed


def test_dropout_without_a_seed_follows_the_generator(full: fagen.Attention) -> None:
    values = {name: value for name, value in VALUES.items() if name != "seed"} | {"dropout_p": 0.5}
    torch.manual_seed(3)
    first, second = (full(*tensors(), **values) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(full(*tensors(), **values), first)
    assert not torch.equal(first, second)


def test_where_a_kernel_runs(plain: fagen.Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = ops.Attention(PLAIN, emulate=False)
    with pytest.raises(SpecError, match="on the CPU and emulate=False"):
        on_gpu(*tensors())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match="finds no GPU"):
        fagen.load(PLAIN, emulate=False)
    monkeypatch.delenv("FAGEN_ARCH", raising=False)
    with pytest.raises(SpecError, match="unknown architecture 'sm81'"):
        fagen.load(PLAIN, arch="sm81")
    assert plain.kernel("cpu").arch.name == "sm80" and plain.artifact("cpu").target == "emulate"


def test_copies(full: fagen.Attention) -> None:
    """A module that holds one can be copied and pickled."""
    expected = full(*tensors(), **VALUES)
    for copied in (copy.deepcopy(full), pickle.loads(pickle.dumps(full))):
        assert copied.spec == FULL and copied.emulate and copied.kernel("cpu") == full.kernel("cpu")
        assert torch.equal(copied(*tensors(), **VALUES), expected)


# What is built once, and again


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Slugs of what gets compiled from here on."""
    compiled: list[str] = []
    original = build._build_missing

    def note(missing: Any, *arguments: Any) -> None:
        compiled.extend(request.kernel.slug for request in missing)
        original(missing, *arguments)

    monkeypatch.setattr(build, "_build_missing", note)
    return compiled


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(directory))
    return directory


def test_memo(fresh_cache: Path, compilations: list[str]) -> None:
    """One build and one loaded library for all equal specs."""
    first, second = (fagen.load(AttentionSpec(head_dim=16), arch="sm80", emulate=True) for _ in range(2))
    assert compilations == ["fwd_hdim16_bf16_sm80"]
    assert first.kernels("cpu")["fwd"].loaded is second.kernels("cpu")["fwd"].loaded
    assert torch.equal(first(*tensors()), second(*tensors()))
    assert fagen.load(PLAIN, arch="sm90", emulate=True).artifact("cpu") != first.artifact("cpu")
    assert compilations == ["fwd_hdim16_bf16_sm80", "fwd_hdim16_bf16_sm90"]


def test_many_threads(fresh_cache: Path, compilations: list[str]) -> None:
    """Threads that load and call at once on a cold cache all get the right answer, from one build."""
    expected = reference.attention(*tensors(), return_lse=False)
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(fagen.load(PLAIN, arch="sm80", emulate=True)(*tensors()))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for o in results:
        assert isinstance(o, Tensor), o
        assert torch.equal(o, results[0]) and compare_o(o, expected, OUTPUT_BUDGET["bf16"]).passed
    assert len(list(fresh_cache.glob("fwd_*"))) == 1


def test_without_just_in_time_compilation(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_JIT", "0")
    with pytest.raises(CacheError) as caught:
        fagen.load(AttentionSpec(head_dim=16, causal=True), arch="sm80", emulate=True)
    assert "fwd_hdim16_bf16_causal_sm80" in str(caught.value)
    assert "fagen build --head-dim 16 --causal --arch sm80 --emulate" in str(caught.value)


def test_an_edited_template_is_the_new_code(fresh_cache: Path, templates: Path, compilations: list[str]) -> None:
    """Loaded again in the same process: a changed fragment, a changed primitive, and both back again."""
    original = fagen.load(PLAIN, arch="sm80", emulate=True)(*tensors())
    fragment, primitive = templates / "common" / "row_end.cuh.j2", templates / "emulate" / "global.hpp"
    before = fragment.read_text(), primitive.read_text()

    edited, count = re.subn(r"/ sum;", "* 2.0f / sum;", before[0])
    assert count == 1
    fragment.write_text(edited)
    doubled = fagen.load(PLAIN, arch="sm80", emulate=True)
    assert torch.equal(doubled(*tensors()), 2 * original)

    primitive.write_text(before[1] + "\n// changed\n")
    fagen.load(PLAIN, arch="sm80", emulate=True)
    assert len(compilations) == 3

    fragment.write_text(before[0])
    primitive.write_text(before[1])
    assert torch.equal(fagen.load(PLAIN, arch="sm80", emulate=True)(*tensors()), original)
    assert torch.equal(doubled(*tensors()), 2 * original)
    assert len(compilations) == 3


def test_a_broken_template_is_a_build_error_and_the_cache_stays_sound(fresh_cache: Path, templates: Path) -> None:
    good = fagen.load(PLAIN, arch="sm80", emulate=True)(*tensors())
    path = templates / "common" / "row_end.cuh.j2"
    before = path.read_text()
    path.write_text(before + "        no_such_function(TILE_N);\n")
    with pytest.raises(fagen.BuildError, match="no_such_function") as caught:
        fagen.load(PLAIN, arch="sm80", emulate=True)
    assert caught.value.command and caught.value.source is not None and caught.value.source.exists()
    line = before.count("\n") + 1
    for text, message in (
        ("{{ no_such_name }}", f"common/row_end.cuh.j2, line {line}: 'no_such_name' is undefined"),
        ("{% if %}", f"common/row_end.cuh.j2, line {line}: "),
        ('{% include "common/none.j2" %}', "there is no template common/none.j2"),
    ):
        path.write_text(f"{before}{text}\n")
        with pytest.raises(fagen.BuildError, match=re.escape(message)):
            fagen.load(PLAIN, arch="sm80", emulate=True)
    path.write_text(before)
    assert torch.equal(fagen.load(PLAIN, arch="sm80", emulate=True)(*tensors()), good)


# Launches, with a driver that only takes notes


class Driver:
    """Stands in for cuda.bindings.driver: contexts are numbers, and every call is noted."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701

    class CUfunction_attribute(enum.Enum):
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        self.contexts = [0]  # none
        self.result = self.CUresult.CUDA_SUCCESS
        self.launches: list[dict[str, Any]] = []

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, 100 + device

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, self.contexts[-1]

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, module

    def cuFuncSetAttribute(self, *arguments: Any) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS,)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, self.contexts[-1]

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, self.contexts.pop()

    def cuGetErrorString(self, error: Any) -> tuple[Any, ...]:
        return self.CUresult.CUDA_SUCCESS, b"too many resources requested for launch"

    def cuLaunchKernel(self, function: int, *rest: Any) -> tuple[Any, ...]:
        *grid_and_block, smem, stream, pointers, _ = rest
        params = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(pointers).value).value
        assert self.contexts[-1] == function  # a function of a context that is not current cannot be launched
        self.launches.append(
            {"context": function, "sizes": grid_and_block, "smem": smem, "stream": stream, "first": params}
        )
        return (self.result,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(launch, "_bindings", lambda: fake)
    return fake


@pytest.mark.parametrize("current", [0, 100, 101])
def test_a_launch_leaves_the_context_as_it_was(driver: Driver, tmp_path: Path, current: int) -> None:
    """Whether the thread has none, the kernel's own or another device's, and also where the driver refuses (N24)."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(b"")
    driver.contexts = [current]
    kernels_of = [launch.CudaKernel(binary, "entry", device, smem_bytes=48) for device in (1, 0)]
    assert driver.contexts == [current]
    for device, kernel in zip((1, 0), kernels_of, strict=True):
        kernel.launch(grid=7, threads=128, params=(5 + device).to_bytes(8, "little"), stream=9)
        assert driver.contexts == [current]
        assert driver.launches.pop() == {
            "context": 100 + device,
            "sizes": [7, 1, 1, 128, 1, 1],
            "smem": 48,
            "stream": 9,
            "first": 5 + device,
        }
    driver.result = driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    for kernel in kernels_of:
        with pytest.raises(LaunchError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested"):
            kernel.launch(grid=7, threads=128, params=bytes(8), stream=9)
    assert driver.contexts == [current]
    for grid in (0, 2**31):
        with pytest.raises(LaunchError, match=f"{grid} blocks in one launch"):
            kernels_of[0].launch(grid=grid, threads=128, params=bytes(8), stream=9)


def test_kernels_and_streams_are_those_of_the_tensors_device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """N24, B14: two cards of different capability, the second not current."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((8, 0), (8, 9))[device])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "find_or_build", lambda plans, emulate: [FakeArtifact(plan.slug) for plan in plans])
    monkeypatch.setattr(kernels, "_LOADED", {})
    monkeypatch.setattr(kernels, "current_stream", lambda device: 50 + device)
    attention = fagen.Attention(PLAIN)
    for device, arch in (("cuda:1", "sm89"), ("cuda:0", "sm80"), ("cuda", "sm80")):
        assert attention.kernel(device).arch.name == arch
        index = torch.device(device).index or 0
        kernel = attention.kernels(device)["fwd"]
        fields = kernel.plan.params.fields
        pointers = [field.name for field in fields if field.ctype.endswith("*")]
        call = kernels.Launch(kernel, 3, {field.name: 1 for field in fields}, pointers)
        tensor = torch.zeros(1)
        call(tensor, *[None] * (len(pointers) - 1))
        launched = driver.launches.pop()
        assert launched["context"] == 100 + index and launched["stream"] == 50 + index
        assert launched["first"] == tensor.data_ptr()


def test_parameters_are_packed_once_for_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The struct has each tensor's address, or the map of it, whichever came before; and not all structs are kept."""
    loaded = Loaded()
    monkeypatch.setattr(kernels, "_LOADED", {})
    monkeypatch.setattr(kernels, "_MOST_PACKED", 2)
    monkeypatch.setattr(kernels, "EmulatedKernel", lambda binary, entry: loaded)
    plan = next(plan for plan in plans(PLAIN, resolve("sm90a")) if plan.kind == "fwd")
    fields = plan.params.fields
    names = [field.name for field in fields if field.is_tensor]
    shape = (1, 9, 2, 64)
    maps = {
        field.name: TensorMap(shape, (0, 128, 64, 1), 8, is_half=False, emulate=True)
        for field in fields
        if field.is_map
    }
    pointers = [name for name in names if name not in maps]
    assert maps and pointers
    values = {field.name: 1 for field in fields}
    launched = kernels.Launch(kernels.Kernel(plan, cast(Any, FakeArtifact("fake")), None), 3, values, names, maps)
    some = [{name: torch.zeros(shape, dtype=torch.bfloat16) for name in names} for _ in range(4)]
    without: dict[str, Tensor | None] = some[0] | {pointers[0]: None}
    for given in (some[0], some[1], some[0], some[2], without, some[3], some[1], some[0]):
        launched(*given.values())
        addresses = {name: 0 if x is None else x.data_ptr() for name, x in given.items()}
        packed = {name: maps[name].at(address) if name in maps else address for name, address in addresses.items()}
        assert loaded.params.pop() == plan.params.pack(values | packed)
        assert 1 <= len(launched._packed) <= 2
    with pytest.raises(ValueError, match="zip"):
        launched(*some[0].values(), torch.zeros(1))


@pytest.mark.parametrize("spec", [{"head_dim": 16}, 16, None])
def test_what_is_no_spec_is_named(spec: Any) -> None:
    with pytest.raises(SpecError, match=f"spec must be an AttentionSpec, got {type(spec).__name__}"):
        fagen.load(spec)


@pytest.mark.parametrize("arch", [80, 9.0])
def test_an_architecture_is_a_string(arch: Any) -> None:
    with pytest.raises(SpecError, match=f"unknown architecture {arch}; known: sm75"):
        fagen.load(AttentionSpec(head_dim=16), arch=arch)


def test_the_last_call_is_found_for_such_tensors_only(plain: fagen.Attention) -> None:
    """In any order, and without a mistake: tensors that differ in one thing are another call, or none."""
    q, k, v = tensors()
    wanted = plain(q, k, v)
    values = (k.shape, None, None, None, None)
    found = plain._recent.find(values, q, k, v)
    assert found is not None
    again = [x.clone() for x in (q, k, v)]
    assert plain._recent.find(values, *again) is found
    others = [
        (q, k, v.half()),
        (q, k, v.to("meta")),
        (q, k, v[..., :8]),
        (q, k, torch.stack([v, v], -1)[..., 0]),
        (q.expand(2, -1, -1, -1), k, v),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        (q[:, :5], k, v),
        (q, k, v.clone().requires_grad_()),
    ]
    for other in others:
        assert plain._recent.find(values, *other) is None
    for wrong in ([1.0], torch.zeros(2), 2.0):
        assert plain._recent.find((k.shape, wrong, None, None, None), q, k, v) is None
    shorter = plain(q[:, :5], k, v)
    torch.testing.assert_close(shorter, wanted[:, :5])
    torch.testing.assert_close(plain(q, k, v), wanted, rtol=0, atol=0)
    torch.testing.assert_close(plain(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), wanted, rtol=0, atol=0)
    for other in others[:3]:
        with pytest.raises(SpecError):
            plain(*other)
    assert plain._recent.find(values, q, k, v) is None  # the last one had another layout
    plain(q, k, v)
    assert plain._recent.find(values, q, k, v) is not None


class Loaded:
    """A kernel that notes its parameters."""

    def __init__(self) -> None:
        self.params: list[bytes] = []

    def launch(self, *, params: bytes, **others: Any) -> None:
        self.params.append(params)


class FakeArtifact:
    """An artifact with an empty binary."""

    def __init__(self, slug: str) -> None:
        self.directory = Path(slug)
        self.binary = Path(os.devnull)
