"""The parameter struct: what C++ lays out is what Python packs."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from strategies import FEATURES, TOGETHER, specs

from fagen.arch import resolve
from fagen.errors import LaunchError
from fagen.params import Field, ParamStruct
from fagen.plan import plan
from fagen.render import render
from fagen.spec import AttentionSpec
from fagen.toolchain import find_host_compiler

EVERYTHING = AttentionSpec(head_dim=64, **dict.fromkeys(TOGETHER, True))
SPECS = [AttentionSpec(head_dim=64), *(AttentionSpec(head_dim=64, **{name: True}) for name in FEATURES), EVERYTHING]
CTYPES: dict[str, Any] = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "I": ctypes.c_uint32}
CTYPES["f"] = ctypes.c_float

PROGRAM = """\
#include <cstddef>
#include <cstdio>
using u16 = unsigned short; using u32 = unsigned int; using u64 = unsigned long long; using i64 = long long;
{structs}
int main() {{
{prints}
}}
"""


def params(spec: AttentionSpec) -> ParamStruct:
    return plan(spec, resolve("sm80"))[0].params


def struct_text(spec: AttentionSpec) -> str:
    """`struct Params { ... };` and the assertion of its size, as they stand in the generated file."""
    kernel = plan(spec, resolve("sm80"))[0]
    match = re.search(r"^struct Params \{.*?^\};\nstatic_assert\(sizeof\(Params\) == \d+", render(kernel), re.M | re.S)
    assert match is not None
    return match[0] + ', "size");'


def test_offsets_and_sizes_are_those_of_the_compiler(tmp_path: Path) -> None:
    """Every member of every struct, asked of a compiler."""
    structs, prints, expected = [], [], []
    for index, spec in enumerate(SPECS):
        structs.append(f"namespace n{index} {{\n{struct_text(spec)}\n}}")
        prints.append(f'    std::printf("size {index} %zu\\n", sizeof(n{index}::Params));')
        expected.append(f"size {index} {params(spec).size}")
        offset = 0
        for field in params(spec).fields:
            member = f"offsetof(n{index}::Params, {field.name}), sizeof(n{index}::Params::{field.name})"
            prints.append(f'    std::printf("{field.name} %zu %zu\\n", {member});')
            size = struct.calcsize("=" + field.format)
            expected.append(f"{field.name} {offset} {size}")
            offset += size
    source = tmp_path / "offsets.cpp"
    source.write_text(PROGRAM.format(structs="\n".join(structs), prints="\n".join(prints)))
    compiler = find_host_compiler().words
    program = tmp_path / "offsets"
    subprocess.run([*compiler, "-std=c++17", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


@given(specs())
def test_packed_bytes_read_back_as_a_c_struct(spec: AttentionSpec) -> None:
    layout = params(spec)
    members = [(field.name, CTYPES[field.format]) for field in layout.fields]
    mirror: Any = type("Mirror", (ctypes.Structure,), {"_fields_": members})
    values = {field.name: index + 1 for index, field in enumerate(layout.fields)}
    packed = layout.pack(values)
    assert len(packed) == layout.size == ctypes.sizeof(mirror)
    read = mirror.from_buffer_copy(packed)
    assert {name: getattr(read, name) for name in values} == values


def test_only_features_that_are_on_have_parameters() -> None:
    plain = {field.name for field in params(AttentionSpec(head_dim=64)).fields}
    assert not [name for name in plain if re.search("softcap|alibi|window|philox|keep|cu_seqlens|total", name)]
    dense = EVERYTHING.model_copy(update={"varlen": False})
    assert {field.name for field in params(dense).fields} > plain - {"softmax_scale_log2"}
    of_batches = {name for name in plain if name.endswith("_batch_stride")}  # packed sequences need none
    assert {field.name for field in params(EVERYTHING).fields} > plain - {"softmax_scale_log2"} - of_batches


def test_the_struct_says_what_its_pointers_are() -> None:
    assert "const u16* q;  // (Tq, Hq, D)" in struct_text(EVERYTHING)
    assert "const u16* q;  // (B, Sq, Hq, D)" in struct_text(AttentionSpec(head_dim=64))


def test_extremes() -> None:
    layout = ParamStruct([Field("a", "int"), Field("b", "const float*"), Field("c", "u32"), Field("d", "float")])
    packed = layout.pack({"a": -(2**31), "b": 2**64 - 1, "c": 2**32 - 1, "d": -float("inf")})
    assert struct.unpack("<QiIf4x", packed) == (2**64 - 1, -(2**31), 2**32 - 1, -float("inf"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1}, "no value for the kernel parameter 'b'"),
        ({"a": 1, "b": 2, "z": 3, "y": 4}, "the kernel has no parameters y, z"),
        ({"a": 2**31, "b": 1}, "a kernel parameter is out of range"),
        ({"a": 1, "b": -1}, "a kernel parameter is out of range"),
        ({"a": 1.5, "b": 1}, "a kernel parameter is out of range"),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        ParamStruct([Field("a", "int"), Field("b", "u32")]).pack(values)


def test_a_float_that_is_too_large() -> None:
    with pytest.raises(LaunchError, match="out of range"):
        ParamStruct([Field("a", "float")]).pack({"a": 1e300})


def test_two_parameters_of_one_name() -> None:
    with pytest.raises(ValueError, match="two parameters of one name"):
        ParamStruct([Field("a", "int"), Field("a", "u32")])
