"""AttentionSpec: one identity in every spelling, and one clear line for what is not served."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from strategies import FEATURES, HEAD_DIMS, archs, spec_fields, specs

from fagen import cache
from fagen.arch import Arch
from fagen.cli.specs import takes_specs
from fagen.errors import FagenError, SpecError
from fagen.plan import plan
from fagen.render import render
from fagen.spec import MAX_HEAD_DIM, AttentionSpec


def key(spec: AttentionSpec, arch: Arch) -> str:
    """Digest of the kernel of `spec`, with a compiler that is always the same."""
    text = "".join(render(kernel) for kernel in plan(spec, arch))
    return cache.digest(text, ("-std=c++17",), arch.sm, "compiler 1.0")


@given(specs(), specs())
def test_equal_specs_share_hash_and_slug_and_others_do_not(one: AttentionSpec, other: AttentionSpec) -> None:
    assert (one == other) == (one.slug == other.slug) == (one.cli_flags() == other.cli_flags())
    assert one != other or hash(one) == hash(other)
    copy = AttentionSpec(**one.model_dump())
    assert copy == one and hash(copy) == hash(one) and len({copy, one}) == 1


def test_slugs_are_unique() -> None:
    """Every combination of features, dtype and a spread of head dims has a name of its own."""
    dims = [(d, dv) for d in (8, 64, 80, 128, 256) for dv in (None, 8, 16, 72, 128, 256)]
    made = {
        AttentionSpec(head_dim=d, head_dim_v=dv, dtype=dtype, **on)
        for d, dv in dims
        for dtype in ("bf16", "fp16")
        for values in itertools.product((False, True), repeat=len(FEATURES))
        if not ((on := dict(zip(FEATURES, values, strict=True)))["bias"] and on["varlen"])
    }
    assert len({spec.slug for spec in made}) == len(made)


@given(specs())
def test_slug_is_a_file_name_that_shows_what_is_on(spec: AttentionSpec) -> None:
    words = spec.slug.split("_")
    assert spec.slug.replace("_", "").isalnum() and spec.slug == spec.slug.lower()
    assert words[0] == f"hdim{spec.head_dim}" and spec.dtype in words
    names = (*FEATURES, "backward", "deterministic", "split_kv", "paged")
    assert {name for name in names if name.replace("_", "") in words} == set(spec.features)


@given(spec_fields())
def test_a_head_dim_v_that_says_nothing_is_not_part_of_the_identity(fields: dict[str, Any]) -> None:
    short = AttentionSpec(**(fields | {"head_dim_v": None}))
    spelled = AttentionSpec(**(fields | {"head_dim_v": fields["head_dim"]}))
    assert short == spelled and short.slug == spelled.slug and short.dim_v == fields["head_dim"]


@given(specs())
def test_json_round_trip(spec: AttentionSpec) -> None:
    assert AttentionSpec.model_validate_json(spec.model_dump_json()) == spec
    assert AttentionSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True)) == spec
    assert AttentionSpec.model_validate(json.loads(json.dumps(spec.model_dump()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@settings(max_examples=30)
@given(specs(), specs(), archs())
def test_digest_is_that_of_the_spec(one: AttentionSpec, other: AttentionSpec, arch: Arch) -> None:
    """The same in every spelling, another for every other spec and target."""
    copy = AttentionSpec.model_validate_json(one.model_dump_json())
    assert key(one, arch) == key(copy, arch)
    assert (one == other) == (key(one, arch) == key(other, arch))


@given(specs())
def test_flags_name_the_spec_on_the_command_line(spec: AttentionSpec) -> None:
    parsed: list[AttentionSpec] = []

    @takes_specs
    def command(specs: list[AttentionSpec]) -> None:
        parsed.extend(specs)

    app = typer.Typer()
    app.command()(command)
    app(args=spec.cli_flags(), standalone_mode=False)
    assert parsed == [spec]


def test_frozen() -> None:
    spec = AttentionSpec(head_dim=64)
    with pytest.raises(ValueError, match="frozen"):
        spec.head_dim = 128


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_multiple_of_8_is_served(head_dim: int) -> None:
    assert AttentionSpec(head_dim=head_dim, head_dim_v=264 - head_dim).dim_v == 264 - head_dim


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 100}, r"head_dim=100 .*multiple of 8 from 8 to 256; pad .* to 104 .*softmax_scale=100\*\*-0\.5"),
        ({"head_dim": 512}, "head_dim=512 .*multiple of 8 from 8 to 256$"),
        ({"head_dim": 0}, "head_dim=0 .*multiple of 8"),
        ({"head_dim": -64}, "head_dim=-64 .*multiple of 8"),
        ({"head_dim": 64, "head_dim_v": 4}, "head_dim_v=4 .*multiple of 8"),
        ({"head_dim": 64, "head_dim_v": MAX_HEAD_DIM + 8}, "head_dim_v=264 .*multiple of 8"),
        ({"head_dim": 64.0}, r"head_dim=64\.0: .*integer"),
        ({"head_dim": "64"}, "head_dim='64': .*integer"),
        ({"head_dim": True}, "head_dim=True: .*integer"),
        ({}, "head_dim is required"),
        ({"head_dim": 64, "dtype": "int8"}, "dtype='int8': .*'bf16' or 'fp16'"),
        ({"head_dim": 64, "dtype": None}, "dtype=None: .*'bf16' or 'fp16'"),
        ({"head_dim": 64, "soft_cap": True}, "no field 'soft_cap'; its fields: head_dim, .*softcap"),
        ({"head_dim": 64, "causal": 1}, "causal=1: .*boolean"),
        ({"head_dim": 64, "softcap": 50.0}, r"softcap=50\.0: .*boolean"),
        ({"head_dim": 64, "deterministic": True}, "deterministic=True is about gradients: .*backward=True"),
        ({"head_dim": 64, "dtype": "int8", "causal": "yes"}, "dtype='int8'.*; causal='yes'"),
    ],
)
def test_what_is_not_served_is_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as made:
        AttentionSpec(**fields)
    with pytest.raises(SpecError, match=message) as validated:
        AttentionSpec.model_validate(fields)
    with pytest.raises(SpecError) as read:
        AttentionSpec.model_validate_json(json.dumps(fields))
    for error in (made.value, validated.value, read.value):
        assert "\n" not in str(error)
        assert isinstance(error, FagenError) and isinstance(error, ValueError) and error.exit_code == 2


def test_json_that_is_not_a_spec() -> None:
    for text in ("", "{", "[]", "null"):
        with pytest.raises(SpecError) as caught:
            AttentionSpec.model_validate_json(text)
        assert "\n" not in str(caught.value)
