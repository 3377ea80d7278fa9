"""From what a kernel computes and where it runs to the kernels to build and how each is tiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from fagen.arch import Arch, sm75, sm80, sm90
from fagen.arch.tiles import BackwardTile, HopperBackwardTile, HopperTile, LinearTile, SumTile, TileConfig
from fagen.errors import SpecError
from fagen.mods import SINK, Mod
from fagen.params import Field, ParamStruct
from fagen.spec import AttentionSpec
from fagen.tensor_map import ROW_END

Kind = Literal["fwd", "decode", "combine", "bwd_delta", "bwd", "bwd_convert", "bwd_dq"]
Tile = TileConfig | HopperTile | BackwardTile | HopperBackwardTile | SumTile | LinearTile


class _MmaFamily(Protocol):
    """A module of arch/ whose kernels are those of `mma.sync`."""

    def forward_tile(self, spec: AttentionSpec, arch: Arch) -> TileConfig: ...
    def decode_tile(self, spec: AttentionSpec, arch: Arch) -> TileConfig: ...
    def backward_tile(self, spec: AttentionSpec, arch: Arch) -> BackwardTile: ...
    def dq_tile(self, spec: AttentionSpec, arch: Arch) -> TileConfig: ...


_WITHOUT_PRODUCTS = ("combine", "bwd_delta")  # one template for all cards


def _shapes(packed: bool) -> tuple[str, str]:
    """Those of q and of k, but for the head dim."""
    return ("(Tq, Hq, ", "(Tk, Hk, ") if packed else ("(B, Sq, Hq, ", "(B, Sk, Hk, ")


def _input_fields(packed: bool) -> tuple[Field, ...]:
    q, k = _shapes(packed)
    return (
        Field("q", "const u16*", f"{q}D), strides in elements below"),
        Field("k", "const u16*", f"{k}D)"),
        Field("v", "const u16*", f"{k}Dv)"),
    )


def _row_strides(packed: bool, *names: str) -> tuple[Field, ...]:
    """Strides of (batch, row, head, dim) tensors; of packed ones, (row, head, dim)."""
    dims = ("row", "head") if packed else ("batch", "row", "head")
    return tuple(Field(f"{name}_{dim}_stride", "i64") for name in names for dim in dims)


_CU_SEQLENS_Q = Field(
    "cu_seqlens_q", "const int*", "(B + 1,): the first row of each sequence in q, the end of the last"
)
_PACKED_FIELDS = (
    _CU_SEQLENS_Q,
    Field("cu_seqlens_k", "const int*", "(B + 1,): likewise in k and v"),
    Field("seqused_k", "const int*", "(B,): how many keys of each sequence count; or null: all"),
)
_STATS_ROWS = Field("stats_rows", "int", "of statistics and delta a head")
_DQ_TILES = Field("dq_tiles", "int", "query tiles a head in the sum of dQ")


def _sizes(packed: bool, heads: str) -> tuple[Field, ...]:
    of = "of the longest sequence" if packed else ""
    return (
        Field("seqlen_q", "int", of),
        Field("seqlen_k", "int", of),
        Field(heads, "int"),
        Field("group_size", "int", "query heads that share a head of k and v"),
    )


_ROWS = Field("rows", "int", "B * Hq * Sq")
_SPLITS = Field("splits", "int", "parts of the keys")
_SPLIT_FORWARD_FIELDS = (
    *_input_fields(False),
    Field("o", "u16*", "(B, Sq, Hq, Dv), of one part"),
    Field("o_partial", "float*", "(splits, B, Hq, Sq, Dv), of several"),
    Field("lse", "float*", "(splits, B, Hq, Sq), contiguous; null where it is not wanted"),
    *_row_strides(False, "q", "k", "v", "o"),
    *_sizes(False, "heads_q"),
    Field("seqused_k", "const int*", "(B,): the end of the keys of each batch entry; or null: seqlen_k"),
    Field("leftpad_k", "const int*", "(B,): the first of the keys of each batch entry; or null: 0"),
    Field("cache_batch_idx", "const int*", "(B,): which entry of k and v is that of each of q; or null: the same"),
    _SPLITS,
    _ROWS,
)
_PAGE_FIELDS = (
    Field(
        "block_table", "const int*", "(B, pages of an entry): which page of k and v has the keys from page * size on"
    ),
    Field("block_table_stride", "i64"),
    Field("page_shift", "int", "log2 of the size of a page"),
)
_COMBINE_FIELDS = (
    Field("o_partial", "const float*", "(splits, B, Hq, Sq, Dv)"),
    Field("lse_partial", "const float*", "(splits, B, Hq, Sq)"),
    Field("o", "u16*", "(B, Sq, Hq, Dv), strides in elements below"),
    Field("lse", "float*", "(B, Hq, Sq), contiguous; null where it is not wanted"),
    *_row_strides(False, "o"),
    _ROWS,
    Field("seqlen_q", "int"),
    Field("heads_q", "int"),
    _SPLITS,
)


def _lse_field(packed: bool) -> Field:
    rows = "(Hq, Tq)" if packed else "(B, Hq, Sq)"
    return Field("lse", "float*", f"{rows}, contiguous; null where it is not wanted")


_TOTAL_Q = Field("total_q", "int", "Tq")


def _forward_fields(packed: bool, paged: bool) -> tuple[Field, ...]:
    return (
        *_input_fields(packed),
        Field("o", "u16*", "(Tq, Hq, Dv)" if packed else "(B, Sq, Hq, Dv)"),
        _lse_field(packed),
        *_row_strides(packed, "q", "o"),
        *_row_strides(packed and not paged, "k", "v"),
        *_sizes(packed, "heads_q"),
        *((*_PACKED_FIELDS, _TOTAL_Q) if packed else ()),
    )


_TILES_TAKEN = Field(
    "tiles_taken", "u32*", "one number, 0 before and after: tiles that blocks have taken behind their first"
)
_HEADS_A_GROUP = Field("heads_a_group", "int", "query heads whose tiles lie side by side, few for the sake of L2")
_SEQUENCES = Field("batch", "int", "sequences")


def _map_fields(packed: bool) -> tuple[Field, ...]:
    q, k = _shapes(packed)
    return (
        Field("q_map", "const TensorMap", f"{q}D)"),
        Field("k_map", "const TensorMap", f"{k}D)"),
        Field("v_map", "const TensorMap", f"{k}Dv)"),
    )


def _hopper_forward_fields(packed: bool, counts_tiles: bool, in_groups: bool) -> tuple[Field, ...]:
    return (
        *_map_fields(packed),
        Field("o_map", "TensorMap", f"{_shapes(packed)[0]}Dv)"),
        _lse_field(packed),
        *_sizes(packed, "heads_q"),
        *((*_PACKED_FIELDS, _TOTAL_Q, _SEQUENCES) if packed else (Field("tiles", "int", "of all heads"),)),
        *((_TILES_TAKEN,) if counts_tiles else ()),
        *((_HEADS_A_GROUP,) if in_groups else ()),
    )


def _stats_fields(packed: bool, constant: bool) -> tuple[Field, ...]:
    ctype = "const float*" if constant else "float*"
    if packed:
        return Field("stats", ctype, "(Hq, stats_rows, 2): reference and log2 of the sum; or null"), _STATS_ROWS
    return (Field("stats", ctype, "(B, Hq, Sq padded to 128, 2): reference and log2 of the sum; or null"),)


def _statistics_fields(packed: bool) -> tuple[Field, ...]:
    return (
        *_stats_fields(packed, constant=True),
        Field("delta", "const float*", "a number for each row of the statistics"),
    )


def _gradient_fields(packed: bool) -> tuple[Field, ...]:
    return (
        *_input_fields(packed),
        Field("d_o", "const u16*", "as o"),
        *_statistics_fields(packed),
        *_row_strides(packed, "q", "k", "v", "d_o"),
        *_sizes(packed, "heads_k"),
        Field("softmax_scale", "float"),
        *(_PACKED_FIELDS if packed else ()),
    )


def _sum_fields(packed: bool) -> tuple[Field, ...]:
    what = "(Hq, dq_tiles, fragments)" if packed else "(B, Hq, query tiles, fragments)"
    return (
        Field("dq_sum", "float*", f"{what}, zero before; null where dq is not wanted"),
        *((_DQ_TILES,) if packed else ()),
    )


_TURNS = Field(
    "turns", "u32*", "a number for each warpgroup and tile of dq_sum, 0 before: blocks that have added theirs; or null"
)
_KEY_GRADIENTS = (Field("d_k", "u16*", "as k, or null"), Field("d_v", "u16*", "as v, or null"))


def _key_gradient_fields(packed: bool, *, with_sum: bool) -> tuple[Field, ...]:
    return (
        *_KEY_GRADIENTS,
        *_row_strides(packed, "d_k", "d_v"),
        *(_sum_fields(packed) if with_sum else ()),
    )


def _hopper_gradient_fields(packed: bool) -> tuple[Field, ...]:
    return (
        *_map_fields(packed),
        Field("d_o_map", "const TensorMap", f"{_shapes(packed)[0]}Dv)"),
        Field("d_k_map", "TensorMap", "of d_k, where that is not null"),
        Field("d_v_map", "TensorMap", "of d_v, where that is not null"),
        *_KEY_GRADIENTS,
        *_statistics_fields(packed),
        *_sizes(packed, "heads_k"),
        Field("softmax_scale", "float"),
        *(_PACKED_FIELDS if packed else ()),
        *_sum_fields(packed),
    )


def _query_gradient_fields(packed: bool) -> tuple[Field, ...]:
    return (Field("d_q", "u16*", "as q"), *_row_strides(packed, "d_q"))


def _delta_fields(packed: bool) -> tuple[Field, ...]:
    dims = ("head", "row") if packed else ("batch", "head", "row")
    return (
        Field("o", "const u16*", "(Tq, Hq, Dv)" if packed else "(B, Sq, Hq, Dv), strides in elements below"),
        Field("d_o", "const u16*", "likewise"),
        Field("d_lse", "const float*", f"{'(Hq, Tq)' if packed else '(B, Hq, Sq)'}, or null"),
        *_stats_fields(packed, constant=True)[:1],
        Field("delta", "float*", "(Hq, stats_rows)" if packed else "(B, Hq, Sq padded to 128)"),
        *_row_strides(packed, "o", "d_o"),
        *(Field(f"d_lse_{dim}_stride", "i64") for dim in dims),
        Field("seqlen_q", "int", "of the longest sequence" if packed else ""),
        Field("heads_q", "int"),
        *((_CU_SEQLENS_Q, _STATS_ROWS) if packed else ()),
    )


def _convert_fields(packed: bool) -> tuple[Field, ...]:
    return (
        Field("dq_sum", "const float*", f"({'Hq, dq_tiles' if packed else 'B, Hq, query tiles'}, fragments)"),
        Field("d_q", "u16*", "as q, strides in elements below"),
        *_row_strides(packed, "d_q"),
        Field("seqlen_q", "int", "of the longest sequence" if packed else ""),
        Field("heads_q", "int"),
        Field("softmax_scale", "float"),
        *((_CU_SEQLENS_Q, _DQ_TILES) if packed else ()),
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
        in_turns = isinstance(self.tile, BackwardTile) and self.tile.in_turns and self.kind == "bwd"
        name = "fwd" if self.kind == "decode" else "bwd_in_turns" if in_turns else self.kind
        return f"{self.family}/{name}.cu.j2"

    @property
    def family(self) -> str:
        """Folder of the template: sm80 where the architecture's own family lacks the kernel."""
        if isinstance(self.tile, HopperTile | HopperBackwardTile):
            return "sm90"
        return "sm75" if self.arch.family == "sm75" and self.kind not in _WITHOUT_PRODUCTS else "sm80"

    @property
    def primitives(self) -> tuple[str, ...]:
        """Base names of the files of primitives that the template calls."""
        return sm75.primitives(self._primitives) if self.arch.family == "sm75" else self._primitives

    @property
    def _primitives(self) -> tuple[str, ...]:
        if self.kind == "bwd_delta":
            return sm80.DELTA_PRIMITIVES
        if self.kind == "bwd_convert":
            return sm80.CONVERT_PRIMITIVES
        if self.kind == "combine":
            return sm80.COMBINE_PRIMITIVES
        family: tuple[str, ...] = sm80.PRIMITIVES
        if self.kind == "bwd" and not self.spec.deterministic:
            family = sm80.BACKWARD_PRIMITIVES
        if self.spec.split_kv:
            family = sm80.SPLIT_PRIMITIVES
        if isinstance(self.tile, TileConfig) and sm80.page_numbers_bytes(self.spec, self.tile):
            family = (*family, *sm80.PAGE_PRIMITIVES)
        if isinstance(self.tile, HopperTile):
            family = sm90.primitives(self.spec, self.tile)
        if isinstance(self.tile, HopperBackwardTile):
            family = sm90.backward_primitives(self.spec, self.tile)
        of_mods = [name for mod in self.spec.mods for name in mod.primitives]
        if self.kind == "bwd" and not self.spec.deterministic and any(mod.gradient for mod in self.spec.mods):
            of_mods.append("reduce")
        return tuple(dict.fromkeys([*family, *of_mods]))

    @property
    def wgmma_shapes(self) -> tuple[tuple[str, int], ...]:
        """The products of a Hopper kernel: "ss", "ss_new" or "rs", of templates/ptx/wgmma.cuh.j2, and columns."""
        if isinstance(self.tile, HopperBackwardTile):
            return sm90.backward_wgmma_shapes(self.spec, self.tile)
        assert isinstance(self.tile, HopperTile)
        return sm90.wgmma_shapes(self.spec, self.tile)

    @property
    def o_apart(self) -> bool:
        """Whether O has a place of its own in the shared memory of a Hopper kernel."""
        assert isinstance(self.tile, HopperTile)
        return sm90.o_apart(self.spec, self.tile)

    @property
    def shares_keys(self) -> bool:
        """Whether a tile has rows of all query heads that share a head of k and v, one position after the other: where
        the keys are split, but for dropout, whose numbers are drawn for 16 rows of a head together."""
        return self.spec.split_kv and not self.spec.dropout

    @property
    def transposed(self) -> bool:
        """Whether the kernel computes its scores keys by queries."""
        return isinstance(self.tile, HopperBackwardTile)

    @property
    def mods_with_sums(self) -> tuple[Mod, ...]:
        """The modifications of whose values the kernel adds up the gradients."""
        return self.spec.mods_with_sums if self.kind == "bwd" else ()

    @property
    def late_mods(self) -> tuple[Mod, ...]:
        """The modifications whose backward, in a transposed kernel, waits for the gradient of a score."""
        return sm90.late_mods(self.spec)

    @property
    def early_mods(self) -> tuple[Mod, ...]:
        """Those after them, whose backward is of the probability."""
        return self.spec.mods[len(self.late_mods) :]

    @property
    def counts_tiles(self) -> bool:
        """Whether the blocks of a Hopper kernel count the tiles that they take."""
        return sm90.counts_tiles(self.spec)

    @property
    def work_bytes(self) -> int:
        """Shared memory in which the producer of a Hopper kernel says what tile is next, bytes."""
        return sm90.work_bytes(self.spec)

    @property
    def row_end(self) -> int:
        """Where rows of packed sequences end in a tensor map."""
        return ROW_END

    @property
    def qk_columns(self) -> int:
        """Columns of Q and K with their padding."""
        return sm80.padded(self.spec.head_dim)

    @property
    def o_columns(self) -> int:
        """Columns of O with their padding."""
        return sm80.padded(self.spec.dim_v)

    @property
    def least_page(self) -> int:
        """Keys of the smallest page that is served."""
        return sm80.LEAST_PAGE

    @property
    def overlaps(self) -> bool:
        """Whether the kernel may start before the one before it in its stream has ended: it waits for that itself."""
        return self.spec.split_kv and self.arch.capability >= (9, 0)

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
        if self.kind == "combine":
            return self.tile.warps * (self.spec.dim_v + 1) * sm80.FLOAT_BYTES
        if isinstance(self.tile, TileConfig):
            return sm80.smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, HopperTile):
            return sm90.smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, BackwardTile):
            return sm80.backward_smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, HopperBackwardTile):
            return sm90.backward_smem_bytes(self.spec, self.tile)
        if isinstance(self.tile, SumTile):
            return self.tile.tile_m * sm80.padded(self.spec.head_dim) * sm80.ELEMENT_BYTES
        return 0

    @property
    def sum_tile(self) -> SumTile:
        """How the float32 sum of dQ is kept."""
        if isinstance(self.tile, SumTile):
            return self.tile
        assert isinstance(self.tile, BackwardTile | HopperBackwardTile)
        return self.tile.sum_tile(sm80.padded(self.spec.head_dim))

    @cached_property
    def params(self) -> ParamStruct:
        """The kernel's parameter struct."""
        packed = self.spec.varlen
        if self.kind == "bwd_delta":
            return ParamStruct(_delta_fields(packed))
        if self.kind == "bwd_convert":
            return ParamStruct(_convert_fields(packed))
        if self.kind == "combine":
            return ParamStruct(_COMBINE_FIELDS)
        mods = self.spec.mods
        fields = [field for mod in mods for field in mod.fields]
        if self.kind == "bwd":
            fields += [field for mod in mods if mod.gradient for field in mod.gradient.fields]
        if isinstance(self.tile, HopperBackwardTile):
            fields += [*_hopper_gradient_fields(packed), *([_TURNS] if self.spec.deterministic else [])]
        elif self.kind == "bwd":
            fields += _gradient_fields(packed)
            fields += _key_gradient_fields(packed, with_sum=not self.spec.deterministic)
        elif self.kind == "bwd_dq":
            fields += [*_gradient_fields(packed), *_query_gradient_fields(packed)]
        else:
            if self.spec.sink:
                fields += SINK.fields
            if self.spec.paged:
                fields += _PAGE_FIELDS
            if isinstance(self.tile, HopperTile):
                in_groups = self.spec.causal or self.spec.window
                fields += _hopper_forward_fields(packed, self.counts_tiles, in_groups)
            else:
                fields += _SPLIT_FORWARD_FIELDS if self.spec.split_kv else _forward_fields(packed, self.spec.paged)
            if self.spec.backward:
                fields += _stats_fields(packed, constant=False)
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
    unserved = sm75.unserved(spec) if arch.family == "sm75" else None
    if unserved is not None:
        raise SpecError(f"{spec.slug} is not served on {arch.name}: {unserved}")
    hopper = arch.family == "sm90" and sm90.serves(spec)
    tiles_of: _MmaFamily = sm75 if arch.family == "sm75" else sm80
    chosen: dict[Kind, Tile] = {"fwd": sm90.forward_tile(spec) if hopper else tiles_of.forward_tile(spec, arch)}
    specs: dict[Kind, AttentionSpec] = {}
    if spec.split_kv:
        chosen["decode"] = tiles_of.decode_tile(spec, arch)
        chosen["combine"] = LinearTile(warps=4)
        specs["combine"] = AttentionSpec(head_dim=spec.dim_v, dtype=spec.dtype, split_kv=True)
    if spec.backward:
        chosen["bwd_delta"] = LinearTile(warps=4)
        hopper = arch.family == "sm90"
        chosen["bwd"] = sm90.backward_tile(spec) if hopper else tiles_of.backward_tile(spec, arch)
        # These know of head dims, the type and packing only, and so serve every spec that shares them.
        specs["bwd_delta"] = AttentionSpec(head_dim=spec.dim_v, dtype=spec.dtype, varlen=spec.varlen, backward=True)
        if spec.deterministic:
            specs["fwd"] = spec.model_copy(update={"deterministic": False})
        if spec.deterministic and not hopper:
            chosen["bwd_dq"] = tiles_of.dq_tile(spec, arch)
        else:
            specs["bwd_convert"] = AttentionSpec(
                head_dim=spec.head_dim,
                head_dim_v=spec.head_dim_v,
                dtype=spec.dtype,
                varlen=spec.varlen,
                backward=True,
            )
    chosen |= tiles or {}
    if "bwd_convert" in specs:
        main = chosen["bwd"]
        assert isinstance(main, BackwardTile | HopperBackwardTile)
        chosen["bwd_convert"] = main.sum_tile(sm80.padded(spec.head_dim))
    kernels = tuple(KernelPlan(specs.get(kind, spec), kind, arch, tile) for kind, tile in chosen.items())
    for kernel in kernels:
        if kernel.smem_bytes > arch.smem_limit:
            raise SpecError(
                f"{kernel.slug} needs {kernel.smem_bytes} bytes of shared memory a block; "
                f"{arch.name} has {arch.smem_limit}"
            )
    return kernels
