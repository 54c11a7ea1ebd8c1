"""Sources of peers, as limits count them."""

from __future__ import annotations

import ipaddress


def source_network(address: str) -> str:
    """The source of an IP address: itself, or its IPv6 /64, the least that one customer is given.

    An address that is no IP address is its own source.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:100]
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed), 64), strict=False))
