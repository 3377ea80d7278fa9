"""What property tests draw: specs that a kernel serves, and targets."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fagen.arch import Arch, known, resolve
from fagen.errors import SpecError
from fagen.spec import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM, AttentionSpec, feature_names

HEAD_DIMS = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
DTYPES = ("bf16", "fp16")


def _served(feature: str) -> bool:
    try:
        AttentionSpec(head_dim=64, **{feature: True})
    except SpecError:
        return False
    return True


# What changes the result and goes together; gradients have flags of their own, and keys are split without some others.
FEATURES = tuple(name for name in feature_names() if _served(name) and name not in ("backward", "split_kv", "paged"))
# Those that may all be on at once: a bias knows of no packed sequences.
TOGETHER = tuple(name for name in FEATURES if name != "bias")


def spec_fields() -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of AttentionSpec."""
    dims = st.sampled_from(HEAD_DIMS)
    return st.fixed_dictionaries(
        {"head_dim": dims, "dtype": st.sampled_from(DTYPES)},
        optional={"head_dim_v": st.none() | dims}
        | {name: st.booleans() for name in (*FEATURES, "backward", "split_kv", "paged")},
    ).flatmap(_with_order)


def _with_order(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Where there are gradients, in a fixed order or in any; and what excludes another feature without it."""
    if fields.get("bias"):
        fields = fields | {"varlen": False}
    if fields.get("split_kv"):
        return st.just(fields | {"backward": False, "varlen": False})
    fields = fields | {"paged": False}
    if not fields.get("backward"):
        return st.just(fields)
    return st.booleans().map(lambda deterministic: fields | {"deterministic": deterministic})


def specs() -> st.SearchStrategy[AttentionSpec]:
    """Any spec that is served."""
    return spec_fields().map(lambda fields: AttentionSpec(**fields))


TARGETS = [resolve(name + suffix) for name in known() for suffix in ("", "+ptx")]
TURING = [arch for arch in TARGETS if arch.family == "sm75"]


def archs() -> st.SearchStrategy[Arch]:
    """Any target that serves every spec, as machine code or PTX."""
    return st.sampled_from([arch for arch in TARGETS if arch not in TURING])


def served() -> st.SearchStrategy[tuple[AttentionSpec, Arch]]:
    """Any spec, and any target that serves it."""
    turing = specs().map(lambda spec: spec.model_copy(update={"dtype": "fp16"}))
    return st.one_of(st.tuples(specs(), archs()), st.tuples(turing, st.sampled_from(TURING)))
