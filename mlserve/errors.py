"""Every error that mlserve raises on purpose.

    MlserveError
    ├── ConfigError                   an option or a combination of options is wrong        (also ValueError)
    ├── ModelError                    a model can't be loaded
    │   ├── ModelNotFoundError        there is no model at that path or id                  (also FileNotFoundError)
    │   ├── UnsupportedModelError     the architecture or a setting of it isn't served
    │   └── CorruptWeightsError       a weights file is damaged or doesn't fit its config
    ├── AdapterError                  an adapter can't be loaded; the engine goes on
    │   ├── AdapterFileNotFoundError  there is no adapter at that path                      (also FileNotFoundError)
    │   ├── UnsupportedAdapterError   the kind of adapter or a setting of it isn't served
    │   ├── CorruptAdapterError       damaged, or it doesn't fit its config or the base model
    │   └── AdapterLimitError         larger than the options allow
    ├── RequestError                  one request is refused; the engine goes on
    │   ├── AdapterNotFoundError      no adapter has the name that was asked for            (also LookupError)
    │   ├── PromptError               empty, too long, or ids out of range                  (also ValueError)
    │   ├── SamplingParamsError       contradictory or out-of-range sampling parameters     (also ValueError)
    │   ├── CapacityError             the request can never fit in the KV pool
    │   └── ImageError                an image is refused
    │       ├── ImageSourceError      not a source of images, or one that isn't allowed
    │       ├── ImageFetchError       the URL isn't allowed, or its server didn't deliver
    │       ├── ImageLimitError       larger than the limits
    │       ├── UnsupportedImageError the format or pixel type isn't read
    │       └── CorruptImageError     damaged or cut short
    ├── StepError                     a request failed while the model ran; the engine goes on
    └── KernelBuildError              the native CPU kernels could not be built

A message states the fact, the value and the remedy:
"prompt has 600 tokens, limit 512: shorten it or raise max_model_len".
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AdapterFileNotFoundError",
    "AdapterLimitError",
    "AdapterNotFoundError",
    "CapacityError",
    "ConfigError",
    "CorruptAdapterError",
    "CorruptImageError",
    "CorruptWeightsError",
    "ImageError",
    "ImageFetchError",
    "ImageLimitError",
    "ImageSourceError",
    "KernelBuildError",
    "MlserveError",
    "ModelError",
    "ModelNotFoundError",
    "PromptError",
    "RequestError",
    "SamplingParamsError",
    "StepError",
    "UnsupportedAdapterError",
    "UnsupportedImageError",
    "UnsupportedModelError",
]


class MlserveError(Exception):
    """Base of every error that mlserve raises on purpose."""


class ConfigError(MlserveError, ValueError):
    """An option, or a combination of options, is wrong."""


class ModelError(MlserveError):
    """A model can't be loaded."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no model at the path or id that was given."""


class UnsupportedModelError(ModelError):
    """The model's architecture, or a setting of it, isn't served; the message names which."""


class CorruptWeightsError(ModelError):
    """A weights file is damaged, incomplete, or doesn't fit its config."""


class AdapterError(MlserveError):
    """An adapter can't be loaded; requests and other adapters are not affected."""


class AdapterFileNotFoundError(AdapterError, FileNotFoundError):
    """There is no adapter at the path that was given, or one of its files is missing."""


class UnsupportedAdapterError(AdapterError):
    """The kind of adapter, or a setting of it, isn't served; the message names which."""


class CorruptAdapterError(AdapterError):
    """An adapter's files are damaged, contradict each other, or don't fit the base model."""


class AdapterLimitError(AdapterError):
    """The adapter is larger than the options allow."""


class RequestError(MlserveError):
    """One request is refused; nothing else is affected."""


class AdapterNotFoundError(RequestError, LookupError):
    """No adapter has the name that the request asks for."""


class PromptError(RequestError, ValueError):
    """The prompt is empty, too long, or has token ids out of range."""


class SamplingParamsError(RequestError, ValueError):
    """Sampling parameters are out of range or contradict each other."""


class CapacityError(RequestError):
    """The request could never fit in the KV pool, even alone."""


class ImageError(RequestError):
    """An image is refused. No message holds any of its bytes."""


class ImageSourceError(ImageError):
    """This is no source of images, or one that isn't allowed: paths and URLs are opt-in."""


class ImageFetchError(ImageError):
    """The URL, or one it redirects to, isn't allowed, or its server didn't deliver. Messages name the host only."""


class ImageLimitError(ImageError):
    """The image has more bytes, pixels or frames, or a longer side, than the limits allow."""


class UnsupportedImageError(ImageError):
    """The image's format or pixel type isn't read; the message names which."""


class CorruptImageError(ImageError):
    """The image is damaged or cut short."""


class StepError(MlserveError):
    """The model raised while it ran this request; other requests go on."""


class KernelBuildError(MlserveError):
    """The native CPU kernels could not be built; the message says what is missing."""
