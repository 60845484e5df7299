"""Images and embeddings as parts of a message: what goes over the wire is what was given."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from http_server import Served, served
from PIL import Image
from safetensors.numpy import load as load_safetensors
from tiny_vision import write_tiny_vlm

from mlserve import LLM
from mlserve.client import Client, embeddings, image
from mlserve.vision.image import load_image

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp", "BMP": "image/bmp"}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8))


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def url_of(part: dict[str, object]) -> str:
    assert part["type"] == "image_url"
    assert isinstance(part["image_url"], dict)
    assert list(part["image_url"]) == ["url"]
    return part["image_url"]["url"]


@pytest.mark.parametrize("kind", FORMATS)
def test_files_and_bytes_are_sent_as_they_are(tmp_path: Path, kind: str) -> None:
    data = encoded(PICTURE, kind)
    path = tmp_path / "picture.of-no-type"
    path.write_bytes(data)
    url = f"data:{FORMATS[kind]};base64,{b64encode(data).decode()}"
    assert url_of(image(data)) == url_of(image(path)) == url_of(image(str(path))) == url
    load_image(url)  # servers read it


def test_urls_are_sent_as_they_are() -> None:
    for url in ("http://a.example/cat.png", "https://a.example/ü?x=1", "data:image/png;base64,AAAA"):
        assert url_of(image(url)) == url


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "P", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I;16"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_pictures_look_to_the_server_as_they_do_to_the_engine(mode: str, orientation: int) -> None:
    premultiplied = {"La": "LA", "RGBa": "RGBA"}
    if mode == "I;16":
        picture = Image.fromarray((np.arange(48) * 1000).astype(np.uint16).reshape(6, 8))
    else:
        picture = PICTURE.convert(premultiplied.get(mode, mode)).convert(mode)
    assert picture.mode == mode
    picture.getexif()[0x0112] = orientation
    sent = load_image(url_of(image(picture))).pixels
    assert sent.shape == ((6, 8, 3) if orientation == 1 else (8, 6, 3))
    np.testing.assert_array_equal(sent, load_image(picture).pixels)


def test_what_is_no_image(tmp_path: Path) -> None:
    tiff = encoded(PICTURE, "TIFF")
    for data in (b"", b"nothing", b"RIFF\x00\x00\x00\x00WAVEfmt ", tiff):
        with pytest.raises(ValueError, match="no known format: send BMP, GIF, JPEG, PNG, WEBP"):
            image(data)
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match="begins with b'note'"):
        image(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError):
        image(tmp_path / "nothing.png")
    for mode in ("F", "I"):
        with pytest.raises(ValueError, match=f"PIL mode '{mode}'"):
            image(Image.new(mode, (2, 2)))
    with pytest.raises(TypeError, match="the image is a NoneType: give a path"):
        image(None)  # type: ignore[arg-type]


def test_embeddings() -> None:
    values = np.arange(12.0).reshape(3, 4)
    for given in (values, values.tolist(), torch.tensor(values), values.astype(np.float16)[:, :]):
        part = embeddings(given)
        assert part["type"] == "image_embeds"
        sent = load_safetensors(b64decode(part["image_embeds"]))["embeddings"]
        assert sent.dtype == np.float32
        np.testing.assert_array_equal(sent, values)
    np.testing.assert_array_equal(
        load_safetensors(b64decode(embeddings(values.T)["image_embeds"]))["embeddings"], values.T
    )
    with pytest.raises(ValueError, match=r"the embeddings have the shape \[4\]: give \[n, H\]"):
        embeddings(values[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tiny_vlm(tmp_path_factory.mktemp("llava"), "llava")
    with served(LLM(str(model), block_size=4, num_blocks=256).engine) as server:
        yield server


def test_questions_about_images(server: Served) -> None:
    with Client(base_url=f"{server.url}/v1", max_retries=0, timeout=60) as client:
        first = client.ask("what?", images=[image(PICTURE), image(encoded(PICTURE, "BMP"))], max_tokens=4)
        shown = [match.digest for match in first.images if match is not None]
        assert len(shown) == 2
        assert shown[0] == shown[1]  # the same pixels
        with client.stream("what?", images=[image(PICTURE)] * 2, max_tokens=4) as stream:
            assert "".join(stream) == first.text
        assert stream.answer.images == first.images
        assert stream.answer.cached_tokens > 16  # more than an image has
        hidden = np.random.default_rng(1).normal(size=(3, 64))
        assert client.ask("what?", images=[embeddings(hidden)], max_tokens=4).images == [None]
        with pytest.raises(openai.BadRequestError, match=r"shape \[3, 5\]"):
            client.ask("what?", images=[embeddings(hidden[:, :5])])
