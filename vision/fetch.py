"""Gets images from http(s) URLs without being led into the network that the server stands in.

A URL from a request may name an internal service, name a public host whose address is internal, or redirect to either.
So every hop is checked alike, and the socket is opened to the very address that was checked: a name that resolves
differently a moment later changes nothing. The environment's proxies aren't used, since they would resolve names anew.

This is written on `http.client`: it takes a socket that is already connected, which HTTP libraries hide.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import quote, urljoin, urlsplit

from mlserve.errors import ConfigError, ImageFetchError, ImageLimitError
from mlserve.vision.addresses import is_public
from mlserve.vision.source import check_num_bytes

__all__ = ["FetchPolicy", "HttpFetcher", "Network", "SystemNetwork"]

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_PORTS = {"http": 80, "https": 443}
_URL_SAFE = "/%:=&~+!$,;'@()*?[]"  # what is not quoted in a path and a query
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched. Raises `ConfigError` for values out of range."""

    allowed_hosts: frozenset[str] | None = None  # names, or `*.name` for all below it; None: every public host
    schemes: frozenset[str] = frozenset(_PORTS)
    ports: frozenset[int] = frozenset(_PORTS.values())
    max_redirects: int = 3
    timeout: float = 10.0  # seconds for everything but the resolver, whose own limit applies

    def __post_init__(self) -> None:
        if not self.schemes <= _PORTS.keys():
            raise ConfigError(f"schemes are {', '.join(sorted(self.schemes))}: give http, https or both")
        if self.timeout <= 0 or self.max_redirects < 0:
            raise ConfigError(
                f"timeout is {self.timeout}, max_redirects {self.max_redirects}: give a number above 0, and 0 or more"
            )

    def allows_host(self, host: str) -> bool:
        """Whether a host name, in lower case, is on the list."""
        if self.allowed_hosts is None or host in self.allowed_hosts:
            return True
        return any(name.startswith("*.") and host.endswith(name[1:]) for name in self.allowed_hosts)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that the policy allows, taken apart."""

    scheme: str
    host: str  # ASCII, lower case, no brackets
    port: int
    path: str  # and query, ready for the wire

    @property
    def host_header(self) -> str:
        """Host, with the port unless it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class Network(Protocol):
    """What the fetcher needs of the operating system; tests put their own in its place."""

    def resolve(self, host: str, port: int) -> Sequence[str]:
        """All IP addresses of a host. Raises `OSError`."""
        ...

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        """A TCP connection to an IP address. Raises `OSError`."""
        ...

    def encrypt(self, connection: socket.socket, host: str) -> socket.socket:
        """TLS over it, with a certificate that is valid for `host`. Raises `OSError`."""
        ...


class SystemNetwork:
    """The system's resolver, sockets and certificates."""

    def __init__(self) -> None:
        self._tls = ssl.create_default_context()

    def resolve(self, host: str, port: int) -> Sequence[str]:
        """See `Network`."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        """See `Network`."""
        return socket.create_connection((address, port), timeout)

    def encrypt(self, connection: socket.socket, host: str) -> socket.socket:
        """See `Network`."""
        return self._tls.wrap_socket(connection, server_hostname=host)


class HttpFetcher:
    """Fetches by a policy; `fetch` blocks, and threads may share it."""

    def __init__(self, policy: FetchPolicy | None = None, network: Network | None = None) -> None:
        self.policy = policy or FetchPolicy()
        self._network = network or SystemNetwork()

    def fetch(self, url: str, max_bytes: int) -> bytes:
        """See `ImageFetcher`. Bodies are taken as they are: one with a Content-Encoding is refused."""
        deadline = time.monotonic() + self.policy.timeout
        for _ in range(self.policy.max_redirects + 1):
            target = parse_url(url, self.policy)
            try:
                with self._request(target, deadline) as response:
                    if response.status not in _REDIRECTS:
                        return _read_body(response, target, max_bytes)
                    url = urljoin(url, response.getheader("Location", ""))
            except (OSError, ValueError, http.client.HTTPException) as error:
                late = isinstance(error, TimeoutError)
                reason = f"it took more than {self.policy.timeout:g} s" if late else type(error).__name__
                raise ImageFetchError(
                    f"the image at {target.host} can't be fetched ({reason}): try again, or send its bytes"
                ) from None
        raise ImageFetchError(
            f"the image's URL redirects more than {self.policy.max_redirects} times: give the one where it ends"
        )

    @contextmanager
    def _request(self, target: Target, deadline: float) -> Iterator[http.client.HTTPResponse]:
        addresses = self._network.resolve(target.host, target.port)
        if not addresses or not all(map(is_public, addresses)):
            raise ImageFetchError(
                f"{target.host} has an address that isn't public: send the image's bytes, only the internet is asked"
            )
        with self._connect(addresses, target.port, deadline) as plain:
            plain.settimeout(_remaining(deadline))
            connection = self._network.encrypt(plain, target.host) if target.scheme == "https" else plain
            with connection:
                connection.settimeout(_remaining(deadline))
                connection.sendall(_request_head(target))
                stream = _DeadlineStream(connection, deadline)
                # A response only ever calls `makefile` of its socket.
                response = http.client.HTTPResponse(cast(socket.socket, stream), method="GET")
                with response:
                    response.begin()
                    yield response

    def _connect(self, addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
        for address in addresses[:-1]:
            try:
                return self._network.connect(address, port, _remaining(deadline) / 2)
            except OSError:
                continue
        return self._network.connect(addresses[-1], port, _remaining(deadline))


def parse_url(url: str, policy: FetchPolicy) -> Target:
    """Take a URL apart. Raises `ImageFetchError` if it is malformed or the policy doesn't allow it."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, (parts.hostname or "").lower(), parts.port
        path = quote(parts.path or "/", _URL_SAFE) + (f"?{quote(parts.query, _URL_SAFE)}" if parts.query else "")
    except ValueError:
        raise ImageFetchError("the image's URL is malformed: write it as https://host/path") from None
    if scheme not in policy.schemes:
        raise ImageFetchError(f"the image's URL has scheme {scheme!r}: give one of {', '.join(sorted(policy.schemes))}")
    if not host or not host.isascii() or not host.isprintable() or set(host) & set(" \\%@") or "@" in parts.netloc:
        raise ImageFetchError("the image's URL has no plain host: write it as https://host/path, in ASCII")
    if not policy.allows_host(host):
        raise ImageFetchError(f"images aren't fetched from {host}: send its bytes, or allow that host")
    port = _PORTS[scheme] if port is None else port
    if port not in policy.ports:
        allowed = ", ".join(map(str, sorted(policy.ports)))
        raise ImageFetchError(f"the image's URL has port {port}: give one of {allowed}")
    return Target(scheme, host, port, path)


def _request_head(target: Target) -> bytes:
    return (
        f"GET {target.path} HTTP/1.1\r\nHost: {target.host_header}\r\nUser-Agent: mlserve\r\nAccept: image/*\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    ).encode("ascii")


def _read_body(response: http.client.HTTPResponse, target: Target, max_bytes: int) -> bytes:
    if response.status != 200:
        raise ImageFetchError(f"{target.host} answered {response.status}: give a URL that answers with an image")
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ImageFetchError(f"{target.host} sent the image in another encoding, unasked: send its bytes")
    if response.length is not None:
        check_num_bytes(response.length, max_bytes)
    announced, body = response.length, bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise ImageLimitError(f"the image has more than {max_bytes} bytes: shrink it or raise max_bytes")
    if announced is not None and len(body) < announced:
        raise ImageFetchError(f"{target.host} sent {len(body)} of {announced} bytes: try again, or send its bytes")
    return bytes(body)


def _remaining(deadline: float) -> float:
    """Seconds left. Raises `TimeoutError` if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


@dataclass(slots=True)
class _DeadlineStream:
    """Stands for the socket of an `HTTPResponse`."""

    connection: socket.socket
    deadline: float

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self.connection, self.deadline))


class _DeadlineReader(io.RawIOBase):
    """A socket's own timeout is for each read: one byte a second would go on for ever."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._connection.settimeout(_remaining(self._deadline))
        return self._connection.recv_into(buffer)
