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


# GPU kernels, by the dtype of activations and storage. Sums are float32, as the reference's; what is stored between two
# operations, and the result, is rounded to 8 or 11 bits.
TRITON = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1.5e-2},
}
