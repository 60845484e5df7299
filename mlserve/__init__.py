"""mlserve: many LoRA adapters and images on one base model, in one batch, over one shared pool of KV blocks.

`LLM` is loaded when it is first asked for, so that `import mlserve` stays quick and imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlserve.config import (
    AdapterConfig,
    CacheConfig,
    DType,
    EngineConfig,
    ImageConfig,
    ModelOptions,
    Policy,
    SchedulerConfig,
    ServerConfig,
)
from mlserve.constraint import Constraint, ConstraintKind
from mlserve.errors import (
    AdapterError,
    AdapterFileNotFoundError,
    AdapterLimitError,
    AdapterNotFoundError,
    CapacityError,
    ConfigError,
    CorruptAdapterError,
    CorruptImageError,
    CorruptWeightsError,
    ImageError,
    ImageFetchError,
    ImageLimitError,
    ImageSourceError,
    KernelBuildError,
    MlserveError,
    ModelError,
    ModelNotFoundError,
    PromptError,
    RequestError,
    SamplingParamsError,
    StepError,
    UnsupportedAdapterError,
    UnsupportedImageError,
    UnsupportedModelError,
)
from mlserve.request import (
    CompletionOutput,
    FinishReason,
    ImageReport,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    SamplingParams,
    StreamOutput,
    TokenLogprob,
)

if TYPE_CHECKING:
    from mlserve.llm import LLM

__all__ = [
    "LLM",
    "AdapterConfig",
    "AdapterError",
    "AdapterFileNotFoundError",
    "AdapterLimitError",
    "AdapterNotFoundError",
    "CacheConfig",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Constraint",
    "ConstraintKind",
    "CorruptAdapterError",
    "CorruptImageError",
    "CorruptWeightsError",
    "DType",
    "EngineConfig",
    "FinishReason",
    "ImageConfig",
    "ImageError",
    "ImageFetchError",
    "ImageLimitError",
    "ImageReport",
    "ImageSourceError",
    "KernelBuildError",
    "MlserveError",
    "ModelError",
    "ModelNotFoundError",
    "ModelOptions",
    "Policy",
    "PromptError",
    "RequestError",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "SchedulerConfig",
    "ServerConfig",
    "StepError",
    "StreamOutput",
    "TokenLogprob",
    "UnsupportedAdapterError",
    "UnsupportedImageError",
    "UnsupportedModelError",
]

__version__ = "0.1.0"


# Hidden from type checkers, which would otherwise take every misspelt name for a lazy one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "LLM":
            from mlserve.llm import LLM

            return LLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
