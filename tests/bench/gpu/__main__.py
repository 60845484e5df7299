"""Checks every kernel on a GPU, and times each and whole steps, on random weights of Llama-3-8B's shape:

    python -m tests.bench.gpu [--out figures.json]

From the repository's root, in an environment with mlserve and its `test` extra. It takes some 8 minutes and needs no
network. Exit code: 0, or 1 if a check failed, or 2 without a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    # On sys.path the root would put our `kernels/` before Hugging Face's package of that name. What is imported from
    # here stands in two folders of tests instead.
    others = [entry for entry in sys.path if Path(entry).resolve() != TESTS.parent]
    sys.path[:] = [str(TESTS / "bench"), str(TESTS / "support"), *others]
    from gpu.command import main

    sys.exit(main())
