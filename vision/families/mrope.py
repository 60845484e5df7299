"""Positions of three components, for models with M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["mrope_positions"]

Grid = tuple[int, int, int]


def mrope_positions(num_tokens: int, images: Iterable[tuple[int, Grid]]) -> tuple[Tensor, int]:
    """Positions of a prompt's tokens, and how far later tokens are from their index.

    num_tokens: T, of the prompt.
    images: for each image, in order, the index of its first embedding and its `ImageLayout.grid` of frames, rows and
        columns; its embeddings are the `frames * rows * columns` tokens from there on.

    Text counts up in all three components. An image begins where the text before it left off: an embedding's components
    are its frame, row and column from there. Text after it goes on from the image's longer side.

    Returns `[3, T]` int64 and an offset: a token generated at index i >= T has the position `i + offset` in all three.
    Raises `ValueError` for images that overlap or aren't within the prompt.
    """
    positions = torch.empty(3, num_tokens, dtype=torch.int64)
    index = offset = 0
    for start, (frames, rows, columns) in images:
        end = start + frames * rows * columns
        if start < index or end > num_tokens:
            raise ValueError(
                f"an image at tokens {start} to {end} is outside of {index} to {num_tokens}: give images in order, "
                "none over another"
            )
        positions[:, index:start] = torch.arange(index + offset, start + offset)
        grid = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        positions[:, start:end] = torch.stack(grid).flatten(1) + start + offset
        offset += start + max(rows, columns) - end
        index = end
    positions[:, index:] = torch.arange(index + offset, num_tokens + offset)
    return positions, offset
