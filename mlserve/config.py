"""The options of an engine. Each default and each help text lives here once: the SDK and the command line read them.

Options are checked when they are made and never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlserve.errors import ConfigError

if TYPE_CHECKING:
    from mlserve.cache.hashing import BlockHash
    from mlserve.engine.queues import WaitingQueue
    from mlserve.vision.identity import ImageIdentity

__all__ = [
    "AdapterConfig",
    "CacheConfig",
    "DType",
    "EngineConfig",
    "ImageConfig",
    "ModelOptions",
    "Policy",
    "SchedulerConfig",
    "ServerConfig",
]

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_VISION_MODEL = "tiny-vision"  # a small tower in front of the embedded model


class DType(StrEnum):
    """Storage dtype of weights. On a CPU arithmetic is float32 whatever the storage."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Policy(StrEnum):
    """Order in which waiting requests are admitted."""

    FAIR = "fair"
    FCFS = "fcfs"
    PRIORITY = "priority"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _require_positive(name: str, value: int | float | None) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{name} is {value}: give a number above 0")


def _coerce(owner: object, name: str, kind: type[StrEnum]) -> None:
    value = getattr(owner, name)
    if value not in list(kind):
        raise ConfigError(f"{name} is {value!r}: give one of {', '.join(kind)}")
    object.__setattr__(owner, name, kind(value))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool and its prefix cache."""

    block_size: int = _option(16, "tokens in one KV block")
    enable_prefix_caching: bool = _option(True, "reuse the KV of equal prefixes")
    block_hash: str | BlockHash = _option("xxh3_128", "hash that names blocks: xxh3_128 or sha256")
    num_blocks: int | None = _option(None, "blocks in the pool; default: as many as kv_memory holds")
    kv_memory: float | None = _option(
        None, "GiB for the KV pool if num_blocks isn't given; default: 1, or on a GPU what it has to spare"
    )

    def __post_init__(self) -> None:
        _require_positive("block_size", self.block_size)
        _require_positive("num_blocks", self.num_blocks)
        _require_positive("kv_memory", self.kv_memory)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = _option(256, "sequences that may run at once")
    max_num_batched_tokens: int = _option(2048, "tokens in one step; longer prefills are cut into chunks")
    policy: Policy | Callable[[], WaitingQueue] = _option(
        Policy.FAIR, "admission order: fair over adapters and tenants, fcfs, or priority (lower numbers first)"
    )
    max_skips: int = _option(64, "how often later requests may overtake one that waits for KV blocks or adapter slots")

    def __post_init__(self) -> None:
        if not callable(self.policy):
            _coerce(self, "policy", Policy)
        _require_positive("max_num_seqs", self.max_num_seqs)
        _require_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_skips < 0:
            raise ConfigError(f"max_skips is {self.max_skips}: give 0 (strict order) or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "every running sequence needs one token a step; raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters: how many, how large, and where from."""

    max_loras: int = _option(8, "adapters that can be in one batch: slots on the device")
    max_lora_rank: int = _option(64, "largest rank of an adapter, and that of every slot")
    lora_dtype: DType | None = _option(
        None, "how slots store adapters: float32, bfloat16 or float16; default: as weights are stored"
    )
    max_adapter_memory: float = _option(4.0, "GiB of host memory for adapters that were read")
    max_adapter_bytes: int = _option(2**30, "largest weights file of an adapter")
    adapter_dir: str | None = _option(None, "a folder of adapter folders, each served under its name")

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_lora_rank", "max_adapter_memory", "max_adapter_bytes"):
            _require_positive(name, getattr(self, name))
        if self.lora_dtype is not None:
            _coerce(self, "lora_dtype", DType)


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Images: what is taken, when two are the same, and what is kept of them."""

    image_identity: str | ImageIdentity = _option(
        "exact",
        "when images are the same: exact (equal pixels), or also those that look alike: perceptual, or the hashes that "
        "must be near, of phash, dhash, whash and colorhash, such as phash+dhash",
    )
    image_radius: int | None = _option(None, "bits in which near hashes may differ; default: each hash's own")
    image_clip: str | None = _option(
        None, "folder of an open_clip model, by which images that look alike must be alike too"
    )
    default_image_identity: str | None = _option(
        None, "exact or perceptual, for requests that don't say; default: what image_identity allows"
    )
    max_images: int = _option(16, "images of one request")
    max_image_bytes: int = _option(20 * 2**20, "largest file of an image")
    max_image_pixels: int = _option(2**25, "most pixels of an image")
    embedding_cache_memory: float = _option(0.5, "GiB for embeddings of images that may come again")
    image_hosts: str | None = _option(
        None, "hosts that images may be fetched from, separated by commas; default: URLs are refused"
    )

    def __post_init__(self) -> None:
        for name in ("max_images", "max_image_bytes", "max_image_pixels"):
            _require_positive(name, getattr(self, name))
        if self.embedding_cache_memory < 0:
            raise ConfigError(f"embedding_cache_memory is {self.embedding_cache_memory}: give 0 or more")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it is held."""

    model: str = _option(
        EMBEDDED_MODEL, "the name of an embedded model, a folder, a .gguf file, or a Hugging Face hub id"
    )
    dtype: DType = _option(DType.FLOAT32, "how weights are stored: float32, bfloat16 or float16")
    device: str = _option("auto", "auto, cpu or cuda")
    max_model_len: int | None = _option(None, "longest prompt plus output; default: what the model was made for")
    kernels: str = _option("auto", "auto, cpu (native), triton (CUDA) or reference (plain torch)")
    cuda_graphs: bool = _option(
        True, "on a GPU, decode by replaying captured graphs; there are none on a CPU or with kernels reference"
    )

    def __post_init__(self) -> None:
        _coerce(self, "dtype", DType)
        _require_positive("max_model_len", self.max_model_len)


# The parts of an `EngineConfig`, by its fields. No two of them have an option of the same name.
OptionPart = ModelOptions | CacheConfig | SchedulerConfig | AdapterConfig | ImageConfig
OPTION_PARTS: Mapping[str, type[OptionPart]] = MappingProxyType(
    {
        "model": ModelOptions,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "adapters": AdapterConfig,
        "images": ImageConfig,
    }
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    images: ImageConfig = field(default_factory=ImageConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Sort flat options (`block_size=8, dtype="bfloat16"`) into their parts. `ConfigError` for an unknown name."""
        built: dict[str, Any] = {}
        for name, part in OPTION_PARTS.items():
            known = {f.name for f in fields(part)}
            built[name] = part(**{key: options.pop(key) for key in list(options) if key in known})
        if options:
            unknown = next(iter(options))
            near = get_close_matches(unknown, [f.name for part in OPTION_PARTS.values() for f in fields(part)], n=1)
            raise ConfigError(
                f"there is no option {unknown!r}: " + (f"do you mean {near[0]!r}?" if near else "remove it")
            )
        return cls(**built)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on")
    served_model_name: str | None = _option(None, "what requests call the base model; default: its own name")
    api_keys: str | None = _option(
        None, "file of API keys, see `mlserve keys`; default: no key is needed, and nobody may administer"
    )
    adapter_roots: str | None = _option(
        None, "folders, separated by commas, that administrators may load adapters from; default: adapter_dir"
    )
    allowed_origins: str | None = _option(None, "web origins, separated by commas, whose pages may call the server")
    max_requests: int = _option(512, "requests in the server at once; more are told to come back later")
    max_body_bytes: int = _option(32 * 2**20, "largest body of a request")
    request_timeout: float = _option(600.0, "seconds that a request may take")
    drain_timeout: float = _option(30.0, "seconds that running requests have when the server is told to stop")
    tool_call_format: str | None = _option(
        None, "how the model writes tool calls; default: found out from its chat template"
    )
    log_prompts: bool = _option(False, "write prompts and answers to the log")

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "request_timeout", "drain_timeout"):
            _require_positive(name, getattr(self, name))
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}: give one from 1 to 65535, or 0 for any that is free")
