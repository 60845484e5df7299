"""Public bug reports about images, as far as decoding, fetching and identity alone answer them."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import imagehash
import numpy as np
import pytest
from pictures import encode, exif, flat, halves, png_of
from PIL import Image, ImageOps
from tree import run_python

from mlserve import ImageError, ImageFetchError, ImageLimitError, ImageSourceError
from mlserve.cache.hashing import BlockHasher, BlockKey
from mlserve.cache.marks import Mark, MarkKind
from mlserve.vision.fetch import FetchPolicy, HttpFetcher, SystemNetwork
from mlserve.vision.hashes import HashKind
from mlserve.vision.image import DecodedImage, load_image
from mlserve.vision.match import image_digest
from mlserve.vision.perceptual import PerceptualIdentity


def digest(picture: Image.Image | bytes) -> bytes:
    return image_digest(load_image(picture))


def test_3_02_the_whole_digest_reaches_the_block_key() -> None:
    hasher = BlockHasher("xxh3_128", b"m" * 32, "float32", 4)

    def key(image: bytes) -> BlockKey:
        keys: list[BlockKey] = []
        hasher.extend(keys, [], [7] * 4, [Mark(MarkKind.IMAGE, image, 0, 4)])
        return keys[0]

    rng = random.Random(0)
    alike = [bytes([first]) + bytes(29) + b"\xab\xcd" for first in (1, 2)]  # equal but for the first of 32 bytes
    digests = {*alike, *(rng.randbytes(32) for _ in range(70_000))}
    assert len({key(each) for each in digests}) == 70_002
    own = digest(flat())
    assert len(own) == 32
    assert len({key(bytes(byte ^ (at == place) for at, byte in enumerate(own))) for place in range(33)}) == 33


def test_3_03_equal_perceptual_hashes_of_different_pictures() -> None:
    reds = [flat((255, 0, 0)), flat((0, 0, 255)), flat((255, 255, 255)), flat((0, 0, 0))]
    sides = [halves((200, 0, 0), (0, 102, 0)), halves((0, 102, 0), (200, 0, 0))]
    assert len({str(imagehash.dhash(picture)) for picture in reds}) == 1
    assert [imagehash.phash(sides[0]) - imagehash.phash(sides[1])] == [0]
    pictures = [*reds, *sides, flat((128, 128, 128), (1, 1))]
    for kind in HashKind:
        identity = PerceptualIdentity([kind], radius=16)
        found = [identity.identify(load_image(picture)) for picture in pictures]
        assert [match.digest for match in found] == [digest(picture) for picture in pictures]
        assert len({match.digest for match in found}) == len(pictures)


def test_3_04_size_mode_and_palette_are_part_of_the_digest() -> None:
    rng = random.Random(0)
    data = rng.randbytes(13_500)
    pairs = [[Image.frombytes("RGB", size, data) for size in ((30, 150), (150, 30))]]
    pairs.append([Image.frombytes("L", (12, 4), data[:48]), Image.frombytes("RGB", (4, 4), data[:48])])
    palettes = [Image.frombytes("P", (16, 16), bytes(range(256))) for _ in range(2)]
    for picture in palettes:
        picture.putpalette(rng.randbytes(768))
    pairs.append(palettes)
    for first, second in pairs:
        assert first.tobytes() == second.tobytes()
        assert digest(first) != digest(second)
        assert digest(encode(first)) != digest(encode(second))
        assert digest(encode(first)) == digest(first)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_3_05_exif_orientation(image_format: str) -> None:
    picture = Image.new("RGB", (24, 16), (0, 0, 255))
    picture.paste((255, 0, 0), (0, 0, 8, 16))
    turned, plain = (encode(picture, image_format, exif=exif(orientation)) for orientation in (6, 1))
    rotated = load_image(plain).to_pil().transpose(Image.Transpose.ROTATE_270)
    assert rotated.size == (16, 24)
    assert np.array_equal(load_image(turned).pixels, np.asarray(rotated))
    assert digest(turned) == digest(rotated)
    assert digest(turned) != digest(plain)
    assert ImageOps.exif_transpose(load_image(turned).to_pil()).size == (16, 24)  # it isn't turned twice


class Inside(BaseHTTPRequestHandler):
    """Redirects to what its path names, and notes who asked."""

    hits: list[str]

    def do_GET(self) -> None:
        self.hits.append(self.path)
        self.send_response(302)
        self.send_header("Location", self.path[1:])
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def servers() -> Iterator[tuple[HTTPServer, HTTPServer]]:
    """Two on the loopback."""
    made = []
    for _ in range(2):
        made.append(HTTPServer(("127.0.0.1", 0), type("Handler", (Inside,), {"hits": []})))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
    yield made[0], made[1]
    for server in made:
        server.shutdown()
        server.server_close()


class Lured(SystemNetwork):
    """The system's network, in which one public name leads to a local server."""

    def __init__(self, server: HTTPServer) -> None:
        super().__init__()
        self._port = server.server_port

    def resolve(self, host: str, port: int) -> Sequence[str]:
        return ["93.184.215.14"] if host == "images.example" else super().resolve(host, port)

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        assert address == "93.184.215.14"
        return super().connect("127.0.0.1", self._port, timeout)


def test_3_09_no_url_leads_inside(servers: tuple[HTTPServer, HTTPServer]) -> None:
    outer, inner = servers
    direct = [
        f"http://127.0.0.1:{inner.server_port}/",
        f"http://localhost:{inner.server_port}/",
        f"http://[::ffff:127.0.0.1]:{inner.server_port}/",
        f"http://2130706433:{inner.server_port}/",
        "http://169.254.169.254/",
        "http://[::1]/",
        "file:///etc/hostname",
    ]
    policy = FetchPolicy(ports=frozenset({80, inner.server_port}))
    fetcher = HttpFetcher(policy, Lured(outer))
    for url in direct:
        with pytest.raises((ImageFetchError, ImageSourceError)):
            load_image(url, fetcher=fetcher)
        with pytest.raises(ImageFetchError):
            load_image(f"http://images.example/{url}", fetcher=fetcher)
    listed = FetchPolicy(frozenset({"images.example"}), ports=policy.ports)
    with pytest.raises(ImageFetchError, match=r"aren't fetched from elsewhere\.example"):
        load_image("http://images.example/http://elsewhere.example/", fetcher=HttpFetcher(listed, Lured(outer)))
    assert len(outer.RequestHandlerClass.hits) == len(direct) + 1  # type: ignore[attr-defined]
    assert inner.RequestHandlerClass.hits == []  # type: ignore[attr-defined]
    with pytest.raises(ImageSourceError):
        load_image("http://images.example/")  # without a fetcher none is asked


def test_3_10_bombs_are_refused_by_their_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bombs = {"bits": png_of(12_000, 12_000, 1, 0), "colours": png_of(13_000, 13_000, 8, 2)}
    for name, data in bombs.items():
        assert len(data) < 600_000
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        (tmp_path / name).write_text(url)
        with pytest.raises(ImageLimitError) as raised:
            load_image(url)
        assert url[100:140] not in str(raised.value) + caplog.text
    code = f"""
import json, resource
from mlserve import ImageLimitError
from mlserve.vision.image import load_image
kilobytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
urls = [open(path).read() for path in {[str(tmp_path / name) for name in bombs]!r}]
before, refused = kilobytes(), 0
for url in urls:
    try:
        load_image(url)
    except ImageLimitError:
        refused += 1
print(json.dumps([refused, kilobytes() - before]))
"""
    refused, growth = json.loads(run_python(code, "-P").stdout)
    assert refused == 2
    assert growth < 50_000


def test_3_11_only_content_names_an_image() -> None:
    """There is no name that a client could choose: three contents are three images, in each tenant."""
    random_pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    images = [load_image(flat(size=(28, 28))), load_image(flat(size=(56, 56))), DecodedImage(random_pixels)]
    identity = PerceptualIdentity()
    digests = [[identity.identify(image, scope).digest for image in images] for scope in (b"one", b"two")]
    assert digests[0] == digests[1]
    assert len({hashlib.sha256(each).digest() for each in digests[0]}) == 3


def test_errors_are_refusals_of_one_request() -> None:
    for source in (b"", "data:,", "http://host/", "path", flat(size=(1000, 1))):
        with pytest.raises(ImageError, match=": "):
            load_image(source)
