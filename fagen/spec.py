"""AttentionSpec: what a kernel computes. The command line's spec flags, the slug and the digest derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fagen import registry
from fagen.errors import SpecError
from fagen.mods import MODS, SINK, Mod

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 256, 8

HeadDim = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class AttentionSpec(BaseModel):
    """Names one attention kernel. Frozen, hashable, and equal after a JSON round trip.

    A flag says that a feature exists in the kernel; its value (the cap, the window's sizes, the slopes, the dropout
    probability, the scale) comes with the call. `head_dim_v=None` means `head_dim`.

    Raises SpecError, on construction, for a field that does not exist, a value outside its range, or a combination
    that no kernel serves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head_dim: HeadDim = Field(description="dimension of a head of q and k: a multiple of 8 from 8 to 256")
    head_dim_v: HeadDim | None = Field(None, description="dimension of a head of v and o; as --head-dim if not given")
    dtype: Literal["bf16", "fp16"] = Field("bf16", description="type of q, k, v and o")
    causal: Flag = Field(False, description="each query sees the keys up to its own position, aligned bottom right")
    window: Flag = Field(False, description="sliding window (left, right) around each query's position")
    softcap: Flag = Field(False, description="scores become softcap * tanh(score / softcap)")
    alibi: Flag = Field(False, description="scores lose slope * |distance|, a slope a head")
    bias: Flag = Field(False, description="a tensor is added to the scores, or a mask hides some")
    sink: Flag = Field(False, description="a score a head that every query sees, and whose key has no value")
    dropout: Flag = Field(False, description="probabilities are dropped at random and the rest rescaled")
    varlen: Flag = Field(False, description="packed sequences of any lengths, one after the other, given by cu_seqlens")
    paged: Flag = Field(False, description="keys and values in pages, given by a block table")
    split_kv: Flag = Field(False, description="parallel over the keys, for few queries")
    backward: Flag = Field(False, description="gradients too")
    deterministic: Flag = Field(False, description="bitwise equal gradients from run to run")
    custom: tuple[Annotated[str, Field(strict=True)], ...] = Field(
        (), description="names of score modifications from outside, also given as fields: nearness=True"
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SpecError(_one_line(error)) from None

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> AttentionSpec:
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise SpecError(_one_line(error)) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **kwargs: Any) -> AttentionSpec:
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as error:
            raise SpecError(_one_line(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        # Two spellings of one kernel must be one spec, one slug and one digest.
        if not isinstance(data, dict):
            return data
        if data.get("head_dim_v") == data.get("head_dim"):
            data = {**data, "head_dim_v": None}
        outside = {name: on for name, on in data.items() if name not in cls.model_fields and registry.find(name)}
        for name, on in outside.items():
            if not isinstance(on, bool):
                raise ValueError(f"{name}={on!r}: input should be a valid boolean")
        names = data.get("custom", ())
        if outside and isinstance(names, list | tuple):
            kept = {name: value for name, value in data.items() if name not in outside}
            data = {**kept, "custom": (*names, *(name for name, on in outside.items() if on))}
        return data

    @field_validator("custom", mode="after")
    @classmethod
    def _in_one_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            registry.named(name)
        return tuple(sorted(set(names)))

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.dim_v)):
            if value % HEAD_DIM_STEP or not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
                raise ValueError(f"{name}={value} is not served: {_nearest_head_dims(value)}")
        if self.paged and not (self.split_kv or self.varlen):
            raise ValueError("paged=True needs split_kv=True, for few queries, or varlen=True, for packed ones")
        if self.paged and self.backward:
            raise ValueError("paged=True with backward=True is not served: pages are of a cache, in inference only")
        for name in ("backward", "varlen"):
            if self.split_kv and getattr(self, name):
                raise ValueError(
                    f"split_kv=True with {name}=True is not served: keys are split in dense inference only"
                )
        if self.deterministic and not self.backward:
            raise ValueError("deterministic=True is about gradients: it needs backward=True")
        for mod in self.mods:
            if self.backward and not mod.differentiable:
                raise ValueError(f"backward=True with {mod.name}=True is not served: {mod.name} has no backward")
            for name, reason in mod.unserved_with.items():
                if name in self.features:
                    raise ValueError(f"{mod.name}=True with {name}=True is not served: {reason}")
        return self

    @property
    def dim_v(self) -> int:
        """Head dimension of v and o."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def mods(self) -> tuple[Mod, ...]:
        """The score modifications of this spec, in the order in which they apply. SpecError where one from outside is
        not known in this process."""
        own = [mod for mod in MODS if getattr(self, mod.name)]
        return registry.in_order([*own, *map(registry.named, self.custom)])

    @property
    def mods_with_sums(self) -> tuple[Mod, ...]:
        """The score modifications of whose values the main backward adds up the gradients."""
        return tuple(mod for mod in self.mods if mod.gradient and mod.no_gradient(self.deterministic) is None)

    @property
    def valued(self) -> tuple[Mod, ...]:
        """What a call gives a value for: the score modifications and the sink."""
        return (*self.mods, *((SINK,) if self.sink else ()))

    @property
    def reads_position(self) -> bool:
        """Whether some score modification reads where a query stands among the keys."""
        return any(mod.reads_position for mod in self.mods)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are on, in field order, then those from outside."""
        return (*(name for name in feature_names() if getattr(self, name)), *self.custom)

    @property
    def slug(self) -> str:
        """The spec as part of a file name: only what is on appears, `hdim128_bf16_causal_softcap`."""
        dims = [f"hdim{self.head_dim}"] + ([f"hdimv{self.head_dim_v}"] if self.head_dim_v is not None else [])
        return "_".join([*dims, self.dtype, *(name.replace("_", "") for name in self.features)])

    def cli_flags(self) -> list[str]:
        """The command-line flags that name this spec: `["--head-dim", "128", "--causal"]`."""
        flags = ["--head-dim", str(self.head_dim)]
        if self.head_dim_v is not None:
            flags += ["--head-dim-v", str(self.head_dim_v)]
        if self.dtype != "bf16":
            flags += ["--dtype", self.dtype]
        return flags + [f"--{name.replace('_', '-')}" for name in self.features]


def feature_names() -> Iterator[str]:
    """Names of the boolean fields of AttentionSpec, in field order."""
    return (name for name, field in AttentionSpec.model_fields.items() if field.default is False)


def _nearest_head_dims(value: int) -> str:
    rule = f"a head dim is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
        return rule
    above = -(-value // HEAD_DIM_STEP) * HEAD_DIM_STEP
    return f"{rule}; pad the tensors to {above} with zeros and pass softmax_scale={value}**-0.5"


def _one_line(error: ValidationError) -> str:
    """Every complaint of pydantic in one line, each with its field and what would be right."""
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "extra_forbidden":
            fields = ", ".join([*AttentionSpec.model_fields, *registry.outside()])
            parts.append(f"AttentionSpec has no field {field!r}; its fields: {fields}")
        elif item["type"] == "missing":
            parts.append(f"{field} is required")
        else:
            parts.append(f"{field}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(parts)
