"""Where tokens stand for the rotary embedding, when that isn't their index: M-RoPE (Qwen2-VL, arXiv:2409.12191)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RopePositions"]


@dataclass(frozen=True, slots=True, eq=False)
class RopePositions:
    """Positions of one sequence in frame, row and column."""

    prompt: NDArray[np.int64]  # [3, tokens of the prompt]
    offset: int  # the token at index i behind the prompt has i + offset, three times

    def chunk(self, start: int, end: int) -> NDArray[np.int64]:
        """`[3, end - start]`: the positions of the tokens [start, end)."""
        known = self.prompt[:, start:end]
        behind = np.arange(max(start, self.prompt.shape[1]), end, dtype=np.int64) + self.offset
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)
