"""Which network addresses a fetch may connect to: those that anybody on the internet could."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

__all__ = ["is_public"]

_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: an IPv4 address in the last four bytes


def is_public(address: str) -> bool:
    """Whether an address, as a resolver writes it, is a public one of a single host.

    False for private, loopback, link-local, shared, reserved and multicast ones, and for IPv6 addresses that a relay
    would carry on to any IPv4 address (6to4, Teredo). Of IPv4 addresses that are written in IPv6, the former counts.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        embedded = _embedded(parsed)
        if embedded is None:
            is_relayed = parsed.sixtofour is not None or parsed.teredo is not None
            return parsed in _UNICAST and parsed.is_global and not is_relayed
        parsed = embedded
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _embedded(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(address.packed[12:]) if address in _NAT64 else None
