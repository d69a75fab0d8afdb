"""resolv.conf as a result's `dns`."""

from __future__ import annotations

from ..errors import INVALID_CONFIG, CniError
from ..model import Dns


def read_resolv_conf(path: str) -> Dns:
    nameservers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    domain = ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split("#")[0].split(";")[0].split()
                if len(fields) < 2:
                    continue
                key, values = fields[0], fields[1:]
                if key == "nameserver":
                    nameservers.append(values[0])
                elif key == "domain":
                    domain = values[0]
                elif key == "search":
                    search.extend(values)
                elif key == "options":
                    options.extend(values)
    except OSError as problem:
        raise CniError(
            INVALID_CONFIG, "ipam.resolvConf cannot be read", f"{path}: {problem.strerror}"
        ) from problem
    return Dns(tuple(nameservers), domain, tuple(search), tuple(options))
