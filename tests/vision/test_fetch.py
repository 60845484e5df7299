"""Fetching: which URLs, which addresses, which answers. Nothing here leaves the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pictures import encode, flat

from mlserve import ConfigError, ImageFetchError, ImageLimitError
from mlserve.vision.addresses import is_public
from mlserve.vision.fetch import FetchPolicy, HttpFetcher, SystemNetwork
from mlserve.vision.image import load_image

PUBLIC = "93.184.215.14"
BODY = b"an image"


def answer(status: int = 200, body: bytes = BODY, length: int | None = None, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class FakeNetwork:
    """Answers by host; every connection is one end of a pair of sockets."""

    answers: dict[str, bytes | list[bytes]] = field(default_factory=dict)  # by address
    addresses: dict[str, Sequence[str]] = field(default_factory=dict)  # by host; the public one if it isn't here
    connected: list[tuple[str, int]] = field(default_factory=list)
    encrypted: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    stays_open: bool = False

    def resolve(self, host: str, port: int) -> Sequence[str]:
        if host.startswith("unknown"):
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return self.addresses.get(host, [PUBLIC])

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        assert timeout > 0
        self.connected.append((address, port))
        if address not in self.answers:
            raise ConnectionRefusedError
        ours, theirs = socket.socketpair()
        self.threads.append(threading.Thread(target=self._serve, args=(theirs, self.answers[address])))
        self.threads[-1].start()
        return ours

    def encrypt(self, connection: socket.socket, host: str) -> socket.socket:
        self.encrypted.append(host)
        return connection

    def _serve(self, connection: socket.socket, answers: bytes | list[bytes]) -> None:
        with connection:
            self.requests.append(connection.recv(2**16).decode())
            data = answers if isinstance(answers, bytes) else answers.pop(0)
            try:
                connection.sendall(data)
                if self.stays_open:
                    connection.recv(1)  # until the other side has had enough
            except OSError:
                pass


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    network = FakeNetwork({PUBLIC: answer()})
    yield network
    for thread in network.threads:
        thread.join(5)
        assert not thread.is_alive()


def fetch(network: FakeNetwork, url: str, max_bytes: int = 1000, **policy: Any) -> bytes:
    return HttpFetcher(FetchPolicy(**policy), network).fetch(url, max_bytes)


def test_an_image_by_its_url(network: FakeNetwork) -> None:
    picture = flat()
    network.answers[PUBLIC] = answer(body=encode(picture), Content_Type="text/html")
    image = load_image("https://host.example/a.png", fetcher=HttpFetcher(network=network))
    assert image.pixels.tobytes() == picture.tobytes()


def test_what_is_sent(network: FakeNetwork) -> None:
    assert fetch(network, "https://Host.Example/a b/é.png?x=1&y=%20ü#part") == BODY
    line, *headers = network.requests[0].split("\r\n")
    assert line == "GET /a%20b/%C3%A9.png?x=1&y=%20%C3%BC HTTP/1.1"
    assert {"Host: host.example", "Accept-Encoding: identity", "Connection: close"} <= {*headers}
    assert network.connected == [(PUBLIC, 443)]
    assert network.encrypted == ["host.example"]
    assert fetch(network, "http://host.example") == BODY
    assert network.requests[1].startswith("GET / HTTP/1.1\r\n")
    assert network.encrypted == ["host.example"]


def test_a_url_cannot_add_headers(network: FakeNetwork) -> None:
    fetch(network, "http://host.example/a\r\nX-Other: 1\x0b\x00 HTTP/1.0")
    assert network.requests[0].count("\r\n") == 7
    assert "X-Other:%201%0B%00%20HTTP/1.0 HTTP/1.1\r\n" in network.requests[0]


def test_chunked_bodies(network: FakeNetwork) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    network.answers[PUBLIC] = head + b"3\r\nan \r\n5\r\nimage\r\n0\r\n\r\n"
    assert fetch(network, "http://host.example") == BODY
    with pytest.raises(ImageLimitError, match="more than 7 bytes"):
        fetch(network, "http://host.example", max_bytes=7)
    network.answers[PUBLIC] = head + b"3\r\nan \r\n5\r\nim"
    with pytest.raises(ImageFetchError, match="IncompleteRead"):
        fetch(network, "http://host.example")


@pytest.mark.parametrize(
    "address",
    """127.0.0.1 127.8.8.8 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 239.1.1.1
    240.0.0.1 255.255.255.255 192.0.2.1 198.18.0.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 fec0::1 ff02::1
    ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::7f00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1
    2002:7f00:1:: 2001:0:1::1 2001:db8::1 host.example 2130706433 0x7f.1""".split(),
)
def test_addresses_that_are_not_public(network: FakeNetwork, address: str) -> None:
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        network.addresses["host.example"] = addresses
        with pytest.raises(ImageFetchError, match=r"host\.example has an address that isn't public"):
            fetch(network, "http://host.example/")
    assert network.connected == []


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:21f:cb07::1", f"::ffff:{PUBLIC}", "64:ff9b::808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url", ["http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://[::1]/", "http://localhost/"]
)
def test_other_ways_to_write_the_loopback(url: str) -> None:
    with pytest.raises(ImageFetchError):
        HttpFetcher(FetchPolicy(), SystemNetwork()).fetch(url, 1000)


def test_the_name_is_resolved_once_and_its_address_connected_to(network: FakeNetwork) -> None:
    """A resolver that gives a public address first and an internal one later gets no second chance."""
    given = iter([["198.51.100.7", PUBLIC], ["127.0.0.1"]])
    network.addresses["host.example"] = ["8.8.8.8", PUBLIC]
    network.resolve = lambda host, port: network.addresses[host] if next(given) else []  # type: ignore[method-assign]
    assert fetch(network, "http://host.example/") == BODY
    assert network.connected == [("8.8.8.8", 80), (PUBLIC, 80)]  # the first one refuses
    assert next(given) == ["127.0.0.1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(network: FakeNetwork, status: int) -> None:
    network.answers[PUBLIC] = [
        answer(status, Location="/b?c"),
        answer(status, Location="https://other.example/d"),
        answer(),
    ]
    assert fetch(network, "http://host.example/a") == BODY
    lines = [request.split("\r\n")[:2] for request in network.requests]
    assert lines == [
        ["GET /a HTTP/1.1", "Host: host.example"],
        ["GET /b?c HTTP/1.1", "Host: host.example"],
        ["GET /d HTTP/1.1", "Host: other.example"],
    ]
    assert network.encrypted == ["other.example"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://inside.example/", "inside.example has an address that isn't public"),
        ("http://[::1]/", "::1 has an address that isn't public"),
        ("http://far.example/", "aren't fetched from far.example"),
        ("http://host.example:6379/", "has port 6379: give one of 80, 443"),
        ("file:///etc/hostname", "has scheme 'file': give one of http, https"),
        ("//user:word@host.example/", "has no plain host"),
        ("http://[bad/", "host.example can't be fetched"),
    ],
)
def test_every_hop_is_checked(network: FakeNetwork, location: str, message: str) -> None:
    network.addresses |= {"inside.example": ["10.0.0.7"], "::1": ["::1"]}
    network.answers[PUBLIC] = answer(302, Location=location)
    with pytest.raises(ImageFetchError, match=message):
        fetch(network, "http://host.example/", allowed_hosts=frozenset({"host.example", "inside.example", "::1"}))
    assert network.connected == [(PUBLIC, 80)]


def test_redirects_are_limited(network: FakeNetwork) -> None:
    network.answers[PUBLIC] = answer(302, Location="/again")
    with pytest.raises(ImageFetchError, match="redirects more than 2 times"):
        fetch(network, "http://host.example/", max_redirects=2)
    assert len(network.connected) == 3
    network.answers[PUBLIC] = answer(302)  # to nowhere
    with pytest.raises(ImageFetchError, match="redirects more than 0 times"):
        fetch(network, "http://host.example/", max_redirects=0)


def test_hosts_that_are_allowed() -> None:
    policy = FetchPolicy(allowed_hosts=frozenset({"a.example", "*.b.example"}))
    assert [host for host in ("a.example", "x.b.example", "x.y.b.example") if not policy.allows_host(host)] == []
    refused = ("x.a.example", "b.example", "xb.example", "a.example.evil.example", "x.b.example.", "*.b.exampl")
    assert [host for host in refused if policy.allows_host(host)] == []
    assert FetchPolicy().allows_host("anything")
    assert not FetchPolicy(allowed_hosts=frozenset()).allows_host("anything")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host.example/", "scheme 'ftp'"),
        ("http:///path", "no plain host"),
        ("http://user@host.example/", "no plain host"),
        ("http://höst.example/", "no plain host"),
        ("http://ho st.example/", "no plain host"),
        ("http://a\\@b.example/", "no plain host"),
        ("http://[fe80::1%25eth0]/", "no plain host"),
        ("http://host.example:99999/", "malformed"),
        ("http://host.example:22/", "port 22"),
        ("http://host.example/\ud800", "malformed"),
        ("http://" + "x" * 70 + ".example:0/", "port 0"),
    ],
)
def test_urls_that_are_refused(network: FakeNetwork, url: str, message: str) -> None:
    with pytest.raises(ImageFetchError, match=message):
        fetch(network, url)
    assert network.connected == []


def test_a_name_that_no_resolver_can_hold() -> None:
    with pytest.raises(ImageFetchError, match="can't be fetched"):
        HttpFetcher().fetch("http://" + "x" * 70 + ".example/", 1000)


@pytest.mark.parametrize("status", [204, 206, 304, 404, 500])
def test_answers_that_are_no_image(network: FakeNetwork, status: int) -> None:
    network.answers[PUBLIC] = answer(status)
    with pytest.raises(ImageFetchError, match=rf"host\.example answered {status}: give"):
        fetch(network, "http://host.example/secret?token=1")


def test_encodings_are_refused(network: FakeNetwork) -> None:
    for encoding in ("gzip", "br", "identity, gzip"):
        network.answers[PUBLIC] = answer(Content_Encoding=encoding)
        with pytest.raises(ImageFetchError, match="in another encoding, unasked"):
            fetch(network, "http://host.example/")
    network.answers[PUBLIC] = answer(Content_Encoding="Identity")
    assert fetch(network, "http://host.example/") == BODY


def test_sizes_are_limited(network: FakeNetwork) -> None:
    assert fetch(network, "http://host.example/", max_bytes=8) == BODY
    with pytest.raises(ImageLimitError, match="has 8 bytes, limit 7: shrink it or raise max_bytes"):
        fetch(network, "http://host.example/", max_bytes=7)
    network.answers[PUBLIC] = answer(length=10**12)
    with pytest.raises(ImageLimitError, match=f"{10**12} bytes"):
        fetch(network, "http://host.example/")
    network.answers[PUBLIC] = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10**6  # says nothing of its length
    with pytest.raises(ImageLimitError, match="more than 1000 bytes"):
        fetch(network, "http://host.example/")


@pytest.mark.parametrize(
    "data", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, answer(length=9)]
)
def test_broken_answers(network: FakeNetwork, data: bytes) -> None:
    network.answers[PUBLIC] = data
    with pytest.raises(ImageFetchError, match="try again, or send its bytes"):
        fetch(network, "http://host.example/")


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", answer(length=9)], ids=["none", "head", "body"]
)
def test_silence_ends(network: FakeNetwork, data: bytes) -> None:
    network.answers[PUBLIC], network.stays_open = data, True
    with pytest.raises(ImageFetchError, match=r"it took more than 0\.2 s"):
        fetch(network, "http://host.example/", timeout=0.2)


def test_a_trickle_ends(network: FakeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read gets its byte in time, but time for all of them together is limited."""
    stop = threading.Event()

    def trickle(connection: socket.socket, answers: object) -> None:
        with connection:
            connection.recv(2**16)
            try:
                while not stop.wait(0.02):
                    connection.sendall(b"H")
            except OSError:
                pass

    monkeypatch.setattr(network, "_serve", trickle)
    with pytest.raises(ImageFetchError, match=r"it took more than 0\.3 s"):
        fetch(network, "http://host.example/", timeout=0.3)
    stop.set()


def test_hosts_that_cannot_be_reached(network: FakeNetwork) -> None:
    with pytest.raises(ImageFetchError, match=r"unknown\.example can't be fetched \(gaierror\)"):
        fetch(network, "http://unknown.example/")
    network.addresses["host.example"] = ["8.8.8.8"]
    with pytest.raises(ImageFetchError, match=r"host\.example can't be fetched \(ConnectionRefusedError\)"):
        fetch(network, "http://host.example/")
    network.addresses["host.example"] = []
    with pytest.raises(ImageFetchError):
        fetch(network, "http://host.example/")


def test_certificates_are_checked_against_the_name() -> None:
    """The system's network wants TLS of the other side, and fails where there is none."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with theirs, pytest.raises(OSError, match="SSL"):
        SystemNetwork().encrypt(ours, "host.example")
    ours.close()


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"max_redirects": -1}, {"schemes": frozenset({"ftp"})}], ids=lambda o: next(iter(o))
)
def test_policies_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FetchPolicy(**options)
