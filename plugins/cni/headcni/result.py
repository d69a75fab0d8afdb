"""CNI results: a single form inside HeadCNI, and the shape of each version outside.

Inside, a result is a plain dict as in CNI 1.1.0, without empty values. `read` is as strict as
libcni's types. It also keeps what libcni writes into results of older versions, such as an MTU.
`shape` writes only what the specification of the version has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_interface

from . import light_json as json
from .errors import INCOMPATIBLE_VERSION, INVALID_CONFIG, CniError
from .model import Address, Dns, LeasedAddress
from .record import TYPE_CHECKING
from .skel import LATEST, OLDEST, READABLE, VERSIONS

if TYPE_CHECKING:
    from typing import Any, Callable, TypeAlias

Result: TypeAlias = "dict[str, Any]"


def shape(result: Mapping[str, Any], version: str) -> Result:
    """A canonical result as the given version has it."""
    if version in OLDEST:
        return _oldest(result, version)
    ips: Iterable[Mapping[str, Any]] = result.get("ips") or ()
    if before(version, "1.0.0"):
        ips = [{"version": "6" if ":" in ip["address"] else "4", **ip} for ip in ips]
    latest = not before(version, "1.1.0")
    interface, route = (_INTERFACE, _ROUTE) if latest else (_INTERFACE_1_0, _ROUTE_1_0)
    sections = {
        "interfaces": [_only(interface, item) for item in result.get("interfaces") or ()],
        "ips": [_only(_IP_SHAPED, item) for item in ips],
        "routes": [_only(route, item) for item in result.get("routes") or ()],
        "dns": _only(_DNS, result.get("dns") or {}),
    }
    return {"cniVersion": version, **{key: value for key, value in sections.items() if value}}


def _oldest(result: Mapping[str, Any], version: str) -> Result:
    """The first address of each family, with the routes of that family."""
    shaped: Result = {"cniVersion": version}
    for ip in result.get("ips") or ():
        made = {"ip": ip["address"], "gateway": ip.get("gateway")}
        family = "ip6" if ":" in ip["address"] else "ip4"
        shaped.setdefault(family, {key: value for key, value in made.items() if value})
    for route in result.get("routes") or ():
        family = "ip6" if ":" in route["dst"] else "ip4"
        if family in shaped:
            shaped[family].setdefault("routes", []).append(_only(_ROUTE_1_0, route))
    dns = _only(_DNS, result.get("dns") or {})
    return {**shaped, "dns": dns} if dns else shaped


def ips_of(leased: Iterable[LeasedAddress], interface: int | None = None) -> list[Result]:
    """A lease as the ips of a result. `interface` is their index in its interfaces."""
    found = []
    for one in leased:
        ip: Result = {"address": one.interface}
        if one.gateway is not None:
            ip["gateway"] = str(one.gateway)
        if interface is not None:
            ip["interface"] = interface
        found.append(ip)
    return found


def addresses_of(result: Mapping[str, Any]) -> list[Address]:
    """The addresses of a result, except for malformed ones."""
    found = []
    for ip in result.get("ips") or ():
        with suppress(ValueError, KeyError, TypeError):
            found.append(ip_interface(ip["address"]).ip)
    return found


def leased_by(result: Mapping[str, Any]) -> list[LeasedAddress]:
    """The addresses of a result."""
    found = []
    for ip in result.get("ips", ()):
        interface = ip_interface(ip["address"])
        gateway = ip_address(ip["gateway"]) if ip.get("gateway") else None
        found.append(LeasedAddress(interface.ip, interface.network.prefixlen, gateway))
    return found


def dns_of(dns: Dns) -> Result:
    given = {
        "nameservers": list(dns.nameservers),
        "domain": dns.domain,
        "search": list(dns.search),
        "options": list(dns.options),
    }
    return {key: value for key, value in given.items() if value}


def read(result: Mapping[str, Any], version: str) -> Result:
    """A result of any version in the canonical form. One CniError names all mistakes.

    ``version`` is that of the configuration, for a result without its own.
    """
    own = result.get("cniVersion")
    require(own if own not in (None, "") else version)
    wrong: list[str] = []
    sections = {
        "interfaces": list(_listed("interfaces", result, _INTERFACE, ("name",), wrong)),
        "ips": list(_listed("ips", result, _IP, ("address",), wrong)),
        "routes": list(_listed("routes", result, _ROUTE, ("dst",), wrong)),
        "dns": _checked("dns", result.get("dns"), _DNS, (), wrong),
    }
    if wrong:
        raise CniError(INVALID_CONFIG, "the CNI result is malformed", "; ".join(wrong))
    return {"cniVersion": LATEST, **{key: value for key, value in sections.items() if value}}


def require(version: Any) -> str:
    """The version, if it is supported."""
    if version not in READABLE:
        shown = json.dumps(version, default=str)
        raise CniError(
            INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            f"the result's cniVersion is {shown}; HeadCNI speaks {', '.join(VERSIONS)}",
        )
    return str(version)


def before(version: str, other: str) -> bool:
    return READABLE.index(require(version)) < READABLE.index(other)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a number")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of strings")
    return value


def _cidr(value: Any) -> str:
    expected = "an address in CIDR notation"
    if not isinstance(value, str) or not value.partition("/")[2].isdigit():
        raise ValueError(expected)
    try:
        return str(ip_interface(value))
    except ValueError:
        raise ValueError(expected) from None


def _address(value: Any) -> str:
    try:
        return str(ip_address(_text(value)))
    except ValueError:
        raise ValueError("an IP address") from None


Fields: TypeAlias = "Mapping[str, Callable[[Any], Any]]"

# In the order of the output. A reader raises a ValueError that says what it expects.
_INTERFACE_1_0: Fields = {"name": _text, "mac": _text, "sandbox": _text}
_INTERFACE: Fields = {
    "name": _text,
    "mac": _text,
    "mtu": _number,
    "sandbox": _text,
    "socketPath": _text,
    "pciID": _text,
}
_IP: Fields = {"interface": _number, "address": _cidr, "gateway": _address}
_IP_SHAPED: Fields = {"version": _text, **_IP}  # before 1.0.0
_ROUTE_1_0: Fields = {"dst": _cidr, "gw": _address}
_ROUTE: Fields = {
    "dst": _cidr,
    "gw": _address,
    "mtu": _number,
    "advmss": _number,
    "priority": _number,
    "table": _number,
    "scope": _number,
}
_DNS: Fields = {"nameservers": _texts, "domain": _text, "search": _texts, "options": _texts}

# The numbers for which 0 is a value. For the others, 0 means that the number is not given.
_ZERO_COUNTS = frozenset(("interface", "table", "scope"))


def _only(fields: Fields, item: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key in fields:
        value = item.get(key)
        if value or key == "name" or (value == 0 and key in _ZERO_COUNTS):
            kept[key] = value
    return kept


def _listed(
    key: str, result: Mapping[str, Any], fields: Fields, needed: tuple[str, ...], wrong: list[str]
) -> Iterator[dict[str, Any]]:
    items = result.get(key)
    if items is not None and not isinstance(items, list):
        wrong.append(f"{key} is {_shown(items)}: expected a list")
        return
    for index, item in enumerate(items or ()):
        yield _checked(f"{key}[{index}]", {} if item is None else item, fields, needed, wrong)


def _checked(
    path: str, item: Any, fields: Fields, needed: tuple[str, ...], wrong: list[str]
) -> dict[str, Any]:
    if item is None:
        return {}
    if not isinstance(item, Mapping):
        wrong.append(f"{path} is {_shown(item)}: expected an object")
        return {}
    values = {}
    for key, reader in fields.items():
        value = item.get(key)
        if value is None or (value == "" and key not in needed):
            if key in needed:
                wrong.append(f"{path}.{key} is missing")
            continue
        try:
            values[key] = reader(value)
        except ValueError as expected:
            wrong.append(f"{path}.{key} is {_shown(value)}: expected {expected}")
    return _only(fields, values)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
