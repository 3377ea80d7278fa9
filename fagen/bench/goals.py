"""What the rows of the speed tables are to reach.

The figures are from one run on one H200 in bf16, medians of CUDA-event timings on random data: forward and backward
TFLOP/s of 16384 tokens, heads * d = 2048; decoding TB/s of calls replayed as a CUDA graph. A card's clocks differ from
day to day; a ratio to PyTorch's cuDNN backend in the same run holds, so every figure here counts as a multiple of what
cuDNN reached beside it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """The rate of FlashAttention-3, of cuDNN in the same run (for a row with softcap, which cuDNN lacks: on the same
    row without), and the goal that was set from that run."""

    fa3: float
    cudnn: float
    goal: float

    def fa3_today(self, cudnn: float) -> float:
        """What FlashAttention-3 would reach where cuDNN reaches `cudnn`."""
        return self.fa3 / self.cudnn * cudnn

    def goal_today(self, cudnn: float) -> float:
        """The goal where cuDNN reaches `cudnn`."""
        return self.goal / self.cudnn * cudnn


FORWARD = {
    "d64 full 16k": Reference(527, 455, 560),
    "d64 causal 16k": Reference(522, 438, 545),
    "d128 full 1k": Reference(627, 561, 630),
    "d128 full 4k": Reference(657, 604, 675),
    "d128 full 16k": Reference(664, 617, 700),
    "d128 causal 1k": Reference(458, 418, 470),
    "d128 causal 4k": Reference(610, 523, 620),
    "d128 causal 16k": Reference(647, 568, 665),
    "d256 full 16k": Reference(744, 669, 750),
    "d256 causal 16k": Reference(706, 602, 715),
    "d128 causal 4k softcap": Reference(487, 523, 530),
    "d128 causal 16k softcap": Reference(542, 568, 590),
    "d256 causal 16k softcap": Reference(665, 602, 690),
}

BACKWARD = {
    "d64 causal 16k": Reference(506, 427, 540),
    "d128 full 16k": Reference(588, 540, 610),
    "d128 causal 4k": Reference(520, 448, 530),
    "d128 causal 16k": Reference(577, 526, 610),
    "d256 causal 16k": Reference(427, 381, 435),
    "d128 causal 16k softcap": Reference(484, 526, 520),
}

DECODE = {
    # 67.1 MB in 32.0, 31.6 and 24 us
    "B=1 16k keys": Reference(67.1 / 32.0, 67.1 / 31.6, 67.1 / 24),
    "B=1 128k keys": Reference(3.79, 3.86, 4.0),
    "B=16 16k keys": Reference(1.44, 4.27, 4.28),
    "B=128 4k keys": Reference(1.37, 4.29, 4.28),
}
