"""Puts an engine together from its options."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from mlserve.adapters.host import read_host_adapter
from mlserve.adapters.registry import AdapterRegistry
from mlserve.adapters.slot_table import SlotTable
from mlserve.adapters.slots import AdapterSlots, slots_bytes
from mlserve.adapters.spec import AdapterLimits
from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHasher
from mlserve.cache.manager import CacheManager
from mlserve.config import AdapterConfig, CacheConfig, EngineConfig, ImageConfig
from mlserve.engine.admission import Limits
from mlserve.engine.engine import Engine
from mlserve.engine.media import ImageDesk
from mlserve.engine.memory import Claims, graph_bytes, kv_budget
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.errors import ConfigError
from mlserve.kernels.reference import ReferenceOps
from mlserve.model.base_weights import base_shape
from mlserve.model.config import DecoderConfig
from mlserve.model.graphs import CudaGraphRecorder, GraphOptions
from mlserve.model.loader import TORCH_DTYPES, LoadedModel, load_model
from mlserve.model.profiling import largest_step, peak_bytes
from mlserve.model.runner import ModelRunner
from mlserve.vision.embedding_cache import EmbeddingCache
from mlserve.vision.encoding import ImageEncoder
from mlserve.vision.families import open_vision
from mlserve.vision.fetch import FetchPolicy, HttpFetcher
from mlserve.vision.identity import ImageIdentity, get_image_identity
from mlserve.vision.image import ImageLimits

__all__ = ["build_engine", "kv_dtype", "lora_dtype", "max_model_len", "num_blocks"]

GIB = 2**30
CPU_KV_GIB = 1.0


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and its tokenizer, allocate the KV pool once, and wire the parts.

    Raises `ModelError` or `ConfigError`.
    """
    model = load_model(config.model)
    cache_config, adapter_config, device = config.cache, config.adapters, model.decoder.device
    dtype = kv_dtype(model.dtype, device)
    max_len = max_model_len(config.model.max_model_len, model.config)
    tokenizer = load_tokenizer(model.tokenizer_source, model.chat_template)
    images = _images(model, tokenizer, config.images)  # its tower takes memory, too
    slots = AdapterSlots(
        base_shape(model.config),
        adapter_config.max_loras,
        adapter_config.max_lora_rank,
        lora_dtype(adapter_config, model.dtype, device),
        device,
    )
    graphs = _graph_options(config, model, max_len)
    claims = _claims(config, model, slots, dtype, graphs)
    blocks = num_blocks(cache_config, model.config, dtype, device, claims)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=max_len,
        capacity=blocks * cache_config.block_size,
        eos_token_ids=model.eos_token_ids,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
    )
    hasher = None
    if cache_config.enable_prefix_caching:
        hasher = BlockHasher(cache_config.block_hash, model.digest, str(dtype), cache_config.block_size)
    adapters = _registry(model, adapter_config)
    encoder = None if images is None else images.encoder
    # After all that may refuse options.
    runner = _runner(model, blocks, cache_config.block_size, dtype, slots, encoder, graphs)
    cache = CacheManager(BlockPool(blocks + 1), hasher, cache_config.block_size)  # block 0 is never handed out
    table = SlotTable(adapter_config.max_loras)
    return Engine(runner, tokenizer, cache, config.scheduler, limits, adapters, table, images)


def kv_dtype(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """KV is kept in the dtype of the arithmetic: float32 on a CPU, that of the weights on a GPU."""
    return torch.float32 if device.type == "cpu" else weights


def lora_dtype(config: AdapterConfig, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """How slots store adapters. Raises `ConfigError` on a GPU if that isn't as the weights are stored."""
    if config.lora_dtype is None:
        return weights
    dtype = TORCH_DTYPES[config.lora_dtype]
    if device.type != "cpu" and dtype != weights:
        raise ConfigError(
            f"lora_dtype is {config.lora_dtype} and weights are stored in {str(weights).removeprefix('torch.')}: on a "
            "GPU they must be the same; leave lora_dtype out, or choose dtype"
        )
    return dtype


def num_blocks(
    config: CacheConfig, model: DecoderConfig, dtype: torch.dtype, device: torch.device, claims: Claims
) -> int:
    """Blocks of the pool: what was asked for, or what fits in the memory budget. Raises `ConfigError` if none fits.

    claims: what the pool must leave of a GPU's memory, where its size is chosen by that.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget: float
    if config.kv_memory is not None:
        budget = config.kv_memory * GIB
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of memory that was given back is free, too
        budget = kv_budget(torch.cuda.mem_get_info(device)[0], claims)
    else:
        budget = CPU_KV_GIB * GIB
    per_block = model.kv_bytes_per_token(dtype) * config.block_size
    fitting = int(budget // per_block)
    if fitting < 1:
        raise ConfigError(
            f"a KV block takes {per_block / 2**20:.1f} MiB, the budget is {budget / 2**20:.1f} MiB: raise kv_memory or "
            "lower block_size"
        )
    return fitting


def _claims(
    config: EngineConfig, model: LoadedModel, slots: AdapterSlots, dtype: torch.dtype, graphs: GraphOptions | None
) -> Claims:
    """What a GPU's memory must hold beside weights and KV: measured, where the size of the pool depends on it."""
    cache, device = config.cache, model.decoder.device
    if device.type != "cuda" or cache.num_blocks is not None or cache.kv_memory is not None:
        return Claims()
    runner = ModelRunner(model.decoder, 1, cache.block_size, dtype, slots)
    most = config.scheduler
    length = max_model_len(config.model.max_model_len, model.config)
    plan = largest_step(most.max_num_batched_tokens, most.max_num_seqs, length, cache.block_size)
    return Claims(
        activations=peak_bytes(partial(runner.run, plan), device),
        adapters=slots_bytes(slots.base, slots.num_slots, slots.max_rank, slots.dtype),
        graphs=0 if graphs is None else graph_bytes(graphs.max_num_seqs, model.config.vocab_size),
    )


def _graph_options(config: EngineConfig, model: LoadedModel, max_model_len: int) -> GraphOptions | None:
    """None where there are no graphs: on a CPU, with operations of plain torch, which read tables on the host, or if
    none are wanted."""
    device = model.decoder.device
    if not config.model.cuda_graphs or device.type != "cuda" or isinstance(model.decoder.ops, ReferenceOps):
        return None
    return GraphOptions(CudaGraphRecorder(device), config.scheduler.max_num_seqs, max_model_len)


def _registry(model: LoadedModel, config: AdapterConfig) -> AdapterRegistry:
    """Raises `ConfigError` if there is no such folder of adapters."""
    directory = None if config.adapter_dir is None else Path(config.adapter_dir)
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"adapter_dir is {config.adapter_dir!r}, which is no folder: give one that holds adapters")
    limits = AdapterLimits(config.max_lora_rank, config.max_adapter_bytes)
    return AdapterRegistry(
        base_shape(model.config),
        model.base_weights,
        limits,
        max_bytes=int(config.max_adapter_memory * GIB),
        directory=directory,
        reader=partial(read_host_adapter, page_locked=model.decoder.device.type == "cuda"),
    )


def _images(model: LoadedModel, tokenizer: Tokenizer, config: ImageConfig) -> ImageDesk | None:
    """None for a model that takes no images."""
    checkpoint = model.vision
    if checkpoint is None:
        return None

    def encode_text(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    vision = open_vision(
        checkpoint.config, checkpoint.folder, checkpoint.tensors, encode_text, device=model.decoder.device
    )
    return ImageDesk(
        ImageEncoder(vision, EmbeddingCache(int(config.embedding_cache_memory * GIB))),
        encode_text(vision.image_token)[0],
        _identity(config),
        ImageLimits(max_bytes=config.max_image_bytes, max_pixels=config.max_image_pixels),
        config.max_images,
        None if config.image_hosts is None else HttpFetcher(FetchPolicy(_hosts(config.image_hosts))),
        config.default_image_identity,
    )


def _identity(config: ImageConfig) -> ImageIdentity:
    identity, radius, clip = config.image_identity, config.image_radius, config.image_clip
    if isinstance(identity, str):
        return get_image_identity(identity, radius, clip)
    if radius is not None or clip is not None:
        raise ConfigError(
            "image_radius and image_clip don't change an image_identity that is an object: set them there"
        )
    return identity


def _hosts(text: str) -> frozenset[str]:
    hosts = frozenset(host.strip() for host in text.split(",") if host.strip())
    if not hosts:
        raise ConfigError(f"image_hosts is {text!r}: name at least one host, or leave it out")
    return hosts


def _runner(
    model: LoadedModel,
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    adapters: AdapterSlots,
    images: ImageEncoder | None,
    graphs: GraphOptions | None,
) -> ModelRunner:
    try:
        return ModelRunner(model.decoder, blocks + 1, block_size, dtype, adapters, images, graphs)
    except RuntimeError as error:  # torch has no narrower one for a CPU
        gib = blocks * block_size * model.config.kv_bytes_per_token(dtype) / GIB
        raise ConfigError(
            f"a KV pool of {blocks} blocks takes {gib:.1f} GiB, which can't be had: lower num_blocks or kv_memory"
        ) from error


def max_model_len(wanted: int | None, model: DecoderConfig) -> int:
    """Tokens of the longest context: what was asked for, or what the model was made for. Raises `ConfigError`."""
    if wanted is not None and wanted > model.max_positions:
        scalings = ", ".join(sorted({rope.scaling for rope in model.ropes}))
        raise ConfigError(
            f"max_model_len is {wanted}, but with rope scaling {scalings} the model serves {model.max_positions} "
            "positions: lower max_model_len"
        )
    return wanted or model.max_positions
