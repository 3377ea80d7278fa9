"""The implementations of attention that `fagen bench` times beside fagen's, all on the same (B, S, H, D) tensors.

Each is a function that makes a call. A package is imported when a call of its is made, so one that is not installed
costs nothing, and one that is broken fails like a row that it cannot do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

    Call = Callable[[], Tensor]
    Make = Callable[[Tensor, Tensor, Tensor, bool, float | None], Call]

FA2, CUDNN, FLEX = "FA2", "cuDNN", "Flex"


@dataclass(frozen=True)
class Contestant:
    """`key` names it on the command line, `name` in tables; `softcap`: whether it has one; `module`: what must be
    installed. `make(q, k, v, causal, softcap)` gives the call to time; it returns the output, (B, S, H, D)."""

    key: str
    name: str
    softcap: bool
    make: Make
    module: str = "torch"


def everyone() -> tuple[Contestant, ...]:
    """All, in the order of the tables' columns."""
    return (
        Contestant("fa2", FA2, False, _sdpa("FLASH_ATTENTION")),
        Contestant("cudnn", CUDNN, False, _sdpa("CUDNN_ATTENTION")),
        Contestant("flex", FLEX, True, _flex),
        Contestant("flash-attn", "flash-attn", True, _package("flash_attn"), "flash_attn.flash_attn_interface"),
        Contestant("fa3", "FA3", True, _package("flash_attn_interface"), "flash_attn_interface"),
        Contestant("fa4", "FA4", True, _package("flash_attn.cute"), "flash_attn.cute"),
    )


def decoders() -> tuple[Contestant, ...]:
    """Those for few queries over many keys, whose heads several of the queries' share: none has a softcap here."""
    cached = "flash_attn_with_kvcache"
    return (
        Contestant("fa2", FA2, False, _sdpa("FLASH_ATTENTION")),
        Contestant("cudnn", CUDNN, False, _sdpa("CUDNN_ATTENTION")),
        Contestant(
            "flash-attn", "flash-attn", False, _package("flash_attn", cached), "flash_attn.flash_attn_interface"
        ),
        Contestant("fa3", "FA3", False, _package("flash_attn_interface", cached), "flash_attn_interface"),
    )


def choose(
    names: Sequence[str] | None = None, *, flex: bool = True, among: Sequence[Contestant] | None = None
) -> tuple[Contestant, ...]:
    """Those that `names` names, by default all of `among` (by default everyone) that are installed; `flex=False` leaves
    out FlexAttention.

    Raises SpecError for a name that nothing has, and for one whose package is not installed.
    """
    known = {contestant.key: contestant for contestant in (everyone() if among is None else among)}
    if names is None:
        chosen = [contestant for contestant in known.values() if installed(contestant.module)]
    else:
        for name in names:
            if name not in known:
                raise SpecError(f"--against {name!r} is none of: {', '.join(known)}")
            if not installed(known[name].module):
                raise SpecError(f"--against {name}: the module {known[name].module} is not installed")
        chosen = [contestant for key, contestant in known.items() if key in names]
    return tuple(contestant for contestant in chosen if flex or contestant.key != "flex")


def installed(module: str) -> bool:
    """Whether a module is there, without importing it or what it is part of."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not inner:
        return spec is not None
    folders = [Path(folder).joinpath(*inner) for folder in spec.submodule_search_locations or ()]
    return any(folder.is_dir() or folder.with_suffix(".py").is_file() for folder in folders)


def _sdpa(backend: str) -> Make:
    """A backend of PyTorch's scaled_dot_product_attention. It takes (B, H, S, D) views of the tensors as they are."""

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> Call:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if softcap is not None:
            raise ValueError(f"{backend} has no softcap")
        q1, k1, v1 = (x.transpose(1, 2) for x in (q, k, v))
        chosen = getattr(SDPBackend, backend)
        grouped = q.shape[2] != k.shape[2]

        def call() -> Tensor:
            with sdpa_kernel(chosen):
                o = torch.nn.functional.scaled_dot_product_attention(q1, k1, v1, is_causal=causal, enable_gqa=grouped)
            return o.transpose(1, 2)

        return call

    return make


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> Call:
    """FlexAttention, compiled: causal is a block mask, softcap a modification of the score."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    views = [x.transpose(1, 2) for x in (q, k, v)]
    named: dict[str, Any] = {}
    if causal:
        seqlens = (q.shape[1], k.shape[1])
        named["block_mask"] = create_block_mask(lambda b, h, i, j: i >= j, None, None, *seqlens, device=q.device.type)
    if softcap is not None:
        named["score_mod"] = lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    # Dynamo gives up compiling a function that it has compiled for many shapes; each row starts anew.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    # A buffer that a backward may overwrite cannot serve the repeated backward that is timed.
    functorch: Any = torch._functorch.config

    def call() -> Tensor:
        if not q.requires_grad:
            return compiled(*views, **named).transpose(1, 2)  # type: ignore[no-any-return]
        with functorch.patch(donated_buffer=False):
            return compiled(*views, **named).transpose(1, 2)  # type: ignore[no-any-return]

    return call


def _package(module: str, function_name: str = "flash_attn_func") -> Make:
    """A function of one of flash-attention's packages."""

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> Call:
        function = getattr(importlib.import_module(module), function_name)
        named: dict[str, Any] = {"causal": causal} if softcap is None else {"causal": causal, "softcap": softcap}

        def call() -> Tensor:
            returned = function(q, k, v, **named)
            o: Tensor = returned[0] if isinstance(returned, tuple) else returned  # some versions add lse
            return o

        return call

    return make
