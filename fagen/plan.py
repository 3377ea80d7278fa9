"""From what a kernel computes and where it runs to the kernels to build and how each is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fagen.arch import Arch, sm80
from fagen.arch.tiles import TileConfig
from fagen.errors import SpecError
from fagen.params import Field, ParamStruct
from fagen.spec import AttentionSpec

Kind = Literal["fwd"]

_FORWARD_FIELDS = (
    Field("q", "const u16*", "(B, Sq, Hq, D), strides in elements below"),
    Field("k", "const u16*", "(B, Sk, Hk, D)"),
    Field("v", "const u16*", "(B, Sk, Hk, Dv)"),
    Field("o", "u16*", "(B, Sq, Hq, Dv)"),
    Field("lse", "float*", "(B, Hq, Sq), contiguous"),
    *(Field(f"{name}_{dim}_stride", "i64") for name in "qkvo" for dim in ("batch", "row", "head")),
    Field("seqlen_q", "int"),
    Field("seqlen_k", "int"),
    Field("heads_q", "int"),
    Field("group_size", "int", "query heads that share a head of k and v"),
)
_SCALE_FIELD = Field("softmax_scale_log2", "float", "softmax_scale * log2(e)")
_WINDOW_FIELDS = (
    Field("window_left", "int", "keys left of the query's position that it sees; causal and -1 resolved by the caller"),
    Field("window_right", "int"),
)
_DROPOUT_FIELDS = (
    Field("philox_state", "const u64*", "seed, offset"),
    Field("keep_threshold", "u32", "a score is kept where its 16 random bits are below"),
    Field("keep_scale", "float", "65536 / keep_threshold"),
)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel to build: what, where and how."""

    spec: AttentionSpec
    kind: Kind
    arch: Arch
    tile: TileConfig

    @property
    def slug(self) -> str:
        """File name of the kernel, `fwd_hdim128_bf16_causal_softcap_sm90`."""
        return f"{self.kind}_{self.spec.slug}_{self.arch.name}"

    @property
    def entry(self) -> str:
        """Name of the kernel's symbol."""
        return f"fagen_{self.kind}"

    @property
    def template(self) -> str:
        """Template of the kernel, relative to `templates/`."""
        return f"{self.arch.family}/{self.kind}.cu.j2"

    @property
    def primitives(self) -> tuple[str, ...]:
        """Base names of the files of primitives that the template calls."""
        return sm80.PRIMITIVES + tuple(dict.fromkeys(name for mod in self.spec.mods for name in mod.primitives))

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.tile.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory a block, bytes."""
        return sm80.smem_bytes(self.spec, self.tile)

    @cached_property
    def params(self) -> ParamStruct:
        """The kernel's parameter struct."""
        mods = self.spec.mods
        fields = [*_FORWARD_FIELDS, *(field for mod in mods for field in mod.fields)]
        if not (mods and mods[0].absorbs_scale):
            fields.append(_SCALE_FIELD)
        if self.spec.window:
            fields += _WINDOW_FIELDS
        if self.spec.dropout:
            fields += _DROPOUT_FIELDS
        return ParamStruct(fields)


def plan(spec: AttentionSpec, arch: Arch, tile: TileConfig | None = None) -> tuple[KernelPlan, ...]:
    """The kernels that `spec` needs on `arch`. `tile` replaces the family's own choice, for tuning.

    Raises SpecError where a block would need more shared memory than the architecture has.
    """
    kernel = KernelPlan(spec, "fwd", arch, tile or sm80.forward_tile(spec, arch))
    if kernel.smem_bytes > arch.smem_limit:
        raise SpecError(
            f"{kernel.slug} needs {kernel.smem_bytes} bytes of shared memory a block; {arch.name} has {arch.smem_limit}"
        )
    return (kernel,)
