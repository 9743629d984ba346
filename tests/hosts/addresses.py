"""The addresses of the page's hosts, and its text where it is to hold with others: over IPv6, by names."""

from __future__ import annotations

import re

from tests.manifests.container import REPOSITORY

_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (10\.0\.0\.\d+(?:, 10\.0\.0\.\d+)*) \|", re.M)
_ADDRESS = re.compile(r"\b10\.0\.0\.(\d+)\b")


def addresses_of(page: str) -> dict[str, str]:
    """The addresses of the hosts, by the table of docs/PAGE."""
    found: dict[str, str] = {}
    for names, addresses in _ROW.findall((REPOSITORY / "docs" / page).read_text()):
        found |= dict(zip(re.findall(r"\w+", names), addresses.split(", "), strict=True))
    return found


def over_ipv6(text: str) -> str:
    """The same with addresses of IPv6 in place of 10.0.0.N, in brackets where a port follows."""
    text = re.sub(r"\b10\.0\.0\.(\d+):(?=\d)", r"[fd77::\1]:", text)
    text = _ADDRESS.sub(r"fd77::\1", text)
    return text.replace("ip saddr", "ip6 saddr").replace("host: 0.0.0.0", 'host: "::"')
