"""How far an implementation may be from the reference.

Both compute in float32 from the same stored numbers, so it is float32's rounding whatever the storage: of a sum of some
1,000 products, of a softmax over some 100 keys, of a few operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

LINEAR = {"rtol": 1e-5, "atol": 3e-6}
ATTENTION = {"rtol": 1e-5, "atol": 1e-5}  # reference and native are each 3e-6 to 5e-6 off float64 (scores of spread 2)
ELEMENTWISE = {"rtol": 2e-6, "atol": 1e-6}


def assert_close(actual: Tensor, expected: Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(actual, expected, **tolerance)
