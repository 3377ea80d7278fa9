"""From what a kernel computes and where it runs to the kernels to build and how each is tiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fagen.arch import Arch, sm80, sm90
from fagen.arch.tiles import BackwardTile, HopperTile, LinearTile, TileConfig
from fagen.errors import SpecError
from fagen.params import Field, ParamStruct
from fagen.spec import AttentionSpec

Kind = Literal["fwd", "bwd_delta", "bwd", "bwd_convert", "bwd_dq"]
Tile = TileConfig | HopperTile | BackwardTile | LinearTile


def _strides(*names: str) -> tuple[Field, ...]:
    return tuple(Field(f"{name}_{dim}_stride", "i64") for name in names for dim in ("batch", "row", "head"))


_INPUT_FIELDS = (
    Field("q", "const u16*", "(B, Sq, Hq, D), strides in elements below"),
    Field("k", "const u16*", "(B, Sk, Hk, D)"),
    Field("v", "const u16*", "(B, Sk, Hk, Dv)"),
)
_FORWARD_FIELDS = (
    *_INPUT_FIELDS,
    Field("o", "u16*", "(B, Sq, Hq, Dv)"),
    Field("lse", "float*", "(B, Hq, Sq), contiguous; null where it is not wanted"),
    *_strides("q", "k", "v", "o"),
    Field("seqlen_q", "int"),
    Field("seqlen_k", "int"),
    Field("heads_q", "int"),
    Field("group_size", "int", "query heads that share a head of k and v"),
)
_HOPPER_FORWARD_FIELDS = (
    Field("q_map", "const TensorMap", "(D, Sq, Hq, B)"),
    Field("k_map", "const TensorMap", "(D, Sk, Hk, B)"),
    Field("v_map", "const TensorMap", "(Dv, Sk, Hk, B)"),
    Field("o_map", "TensorMap", "(Dv, Sq, Hq, B)"),
    Field("lse", "float*", "(B, Hq, Sq), contiguous; null where it is not wanted"),
    Field("seqlen_q", "int"),
    Field("seqlen_k", "int"),
    Field("heads_q", "int"),
    Field("group_size", "int", "query heads that share a head of k and v"),
    Field("tiles", "int", "of all heads"),
    Field("heads_a_group", "int", "query heads whose tiles lie side by side, few for the sake of L2"),
)
_STATS_FIELD = Field("stats", "float*", "(B, Hq, Sq padded to 128, 2): reference and log2 of the sum; or null")
_GRADIENT_FIELDS = (
    *_INPUT_FIELDS,
    Field("d_o", "const u16*", "(B, Sq, Hq, Dv)"),
    Field("stats", "const float*", "(B, Hq, Sq padded to 128, 2), as the forward left it"),
    Field("delta", "const float*", "(B, Hq, Sq padded to 128)"),
    *_strides("q", "k", "v", "d_o"),
    Field("seqlen_q", "int"),
    Field("seqlen_k", "int"),
    Field("heads_k", "int"),
    Field("group_size", "int", "query heads that share a head of k and v"),
    Field("softmax_scale", "float"),
)
_KEY_GRADIENT_FIELDS = (
    Field("d_k", "u16*", "(B, Sk, Hk, D), or null"),
    Field("d_v", "u16*", "(B, Sk, Hk, Dv), or null"),
    *_strides("d_k", "d_v"),
)
_QUERY_GRADIENT_FIELDS = (Field("d_q", "u16*", "(B, Sq, Hq, D)"), *_strides("d_q"))
_DQ_SUM_FIELD = Field("dq_sum", "float*", "(B, Hq, query tiles, fragments), zero before; null where dq is not wanted")
_DELTA_FIELDS = (
    Field("o", "const u16*", "(B, Sq, Hq, Dv), strides in elements below"),
    Field("d_o", "const u16*", "(B, Sq, Hq, Dv)"),
    Field("d_lse", "const float*", "(B, Hq, Sq), or null"),
    Field("delta", "float*", "(B, Hq, Sq padded to 128)"),
    *_strides("o", "d_o", "d_lse"),
    Field("seqlen_q", "int"),
    Field("heads_q", "int"),
)
_CONVERT_FIELDS = (
    Field("dq_sum", "const float*", "(B, Hq, query tiles, fragments)"),
    Field("d_q", "u16*", "(B, Sq, Hq, D), strides in elements below"),
    *_strides("d_q"),
    Field("seqlen_q", "int"),
    Field("heads_q", "int"),
    Field("softmax_scale", "float"),
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
    tile: Tile

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
        return f"{self.family}/{self.kind}.cu.j2"

    @property
    def family(self) -> str:
        """Folder of the template: on Hopper, sm80 where its own family lacks the kernel."""
        return "sm90" if isinstance(self.tile, HopperTile) else "sm80"

    @property
    def primitives(self) -> tuple[str, ...]:
        """Base names of the files of primitives that the template calls."""
        if self.kind == "bwd_delta":
            return sm80.DELTA_PRIMITIVES
        if self.kind == "bwd_convert":
            return sm80.CONVERT_PRIMITIVES
        family: tuple[str, ...] = sm80.PRIMITIVES
        if self.kind == "bwd" and not self.spec.deterministic:
            family = sm80.BACKWARD_PRIMITIVES
        if isinstance(self.tile, HopperTile):
            family = sm90.PRIMITIVES + (sm90.Q_PRIMITIVES if self.tile.q_in_registers else ())
        return family + tuple(dict.fromkeys(name for mod in self.spec.mods for name in mod.primitives))

    @property
    def wgmma_shapes(self) -> tuple[tuple[str, int], ...]:
        """The products of a Hopper kernel: "ss" or "rs", where the first operand comes from, and columns."""
        assert isinstance(self.tile, HopperTile)
        return sm90.wgmma_shapes(self.spec, self.tile)

    @property
    def o_apart(self) -> bool:
        """Whether O has a place of its own in the shared memory of a Hopper kernel."""
        assert isinstance(self.tile, HopperTile)
        return sm90.o_apart(self.spec, self.tile)

    @property
    def o_columns(self) -> int:
        """Columns of O with their padding."""
        return sm80.padded(self.spec.dim_v)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.tile.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory a block, bytes."""
        if self.kind == "bwd_dq":
            assert isinstance(self.tile, TileConfig)
            return sm80.dq_smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, TileConfig):
            return sm80.smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, HopperTile):
            return sm90.smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, BackwardTile):
            if self.kind == "bwd_convert":
                return self.tile.tile_m * sm80.padded(self.spec.head_dim) * sm80.ELEMENT_BYTES
            return sm80.backward_smem_bytes(self.spec, self.tile)
        return 0

    @property
    def dq_tile_floats(self) -> int:
        """Words of the float32 sum of dQ that one query tile takes: common/dq_sum.cuh.j2 in Python."""
        assert isinstance(self.tile, BackwardTile)
        columns = self.tile.warps // self.tile.q_rows
        steps = -(-(sm80.padded(self.spec.head_dim) // sm80.MMA_K) // columns)
        return self.tile.tile_m // 16 * columns * 2 * steps * 128

    @cached_property
    def params(self) -> ParamStruct:
        """The kernel's parameter struct."""
        if self.kind == "bwd_delta":
            return ParamStruct(_DELTA_FIELDS)
        if self.kind == "bwd_convert":
            return ParamStruct(_CONVERT_FIELDS)
        mods = self.spec.mods
        fields = [field for mod in mods for field in mod.fields]
        if self.kind == "bwd":
            fields += [*_GRADIENT_FIELDS, *_KEY_GRADIENT_FIELDS]
            if not self.spec.deterministic:
                fields.append(_DQ_SUM_FIELD)
        elif self.kind == "bwd_dq":
            fields += [*_GRADIENT_FIELDS, *_QUERY_GRADIENT_FIELDS]
        else:
            fields += _HOPPER_FORWARD_FIELDS if isinstance(self.tile, HopperTile) else _FORWARD_FIELDS
            if self.spec.backward:
                fields.append(_STATS_FIELD)
        if not (mods and mods[0].absorbs_scale):
            fields.append(_SCALE_FIELD)
        if self.spec.window:
            fields += _WINDOW_FIELDS
        if self.spec.dropout:
            fields += _DROPOUT_FIELDS
        return ParamStruct(fields)


def plan(spec: AttentionSpec, arch: Arch, tiles: Mapping[Kind, Tile] | None = None) -> tuple[KernelPlan, ...]:
    """The kernels that `spec` needs on `arch`: the forward, and with spec.backward those of the gradients.

    `tiles` replaces the family's own choices, for tuning. Raises SpecError where a block would need more shared memory
    than the architecture has.
    """
    hopper = arch.family == "sm90" and sm90.serves(spec)
    chosen: dict[Kind, Tile] = {"fwd": sm90.forward_tile(spec) if hopper else sm80.forward_tile(spec, arch)}
    specs: dict[Kind, AttentionSpec] = {}
    if spec.backward:
        chosen["bwd_delta"] = LinearTile(warps=4)
        chosen["bwd"] = sm80.backward_tile(spec, arch)
        # These know of head dims and the type only, and so serve every spec that shares them.
        specs["bwd_delta"] = AttentionSpec(head_dim=spec.dim_v, dtype=spec.dtype, backward=True)
        if spec.deterministic:
            specs["fwd"] = spec.model_copy(update={"deterministic": False})
            chosen["bwd_dq"] = sm80.dq_tile(spec, arch)
        else:
            specs["bwd_convert"] = AttentionSpec(
                head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype, backward=True
            )
    chosen |= tiles or {}
    if "bwd_convert" in specs:
        chosen["bwd_convert"] = chosen["bwd"]
    kernels = tuple(KernelPlan(specs.get(kind, spec), kind, arch, tile) for kind, tile in chosen.items())
    for kernel in kernels:
        if kernel.smem_bytes > arch.smem_limit:
            raise SpecError(
                f"{kernel.slug} needs {kernel.smem_bytes} bytes of shared memory a block; "
                f"{arch.name} has {arch.smem_limit}"
            )
    return kernels
