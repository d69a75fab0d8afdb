# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What Headscale has: users, nodes, pre-auth keys and a policy, as its REST API tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Optional


@dataclass(frozen=True)
class User:
    id: str
    name: str
    reference: str = ""  # what its URL ends in: the name up to 0.23, the id since

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> User:
        number, name = str(raw.get("id", "")), str(raw.get("name", ""))
        return cls(number, name, number if "displayName" in raw else name)


@dataclass(frozen=True)
class Node:
    """A node as the list has it. `name` is its DNS label, unique at the server; `hostname` is what
    the machine calls itself, and any number may call themselves so."""

    id: str
    key: str
    name: str
    hostname: str
    user: str = ""
    user_id: str = ""  # its name here may be the one it had before it was renamed
    tags: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    online: bool = False
    last_seen: Optional[datetime] = None
    expiry: Optional[datetime] = None
    available: tuple[str, ...] = ()
    approved: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    tags_need_owners: bool = False  # from 0.28 a tag must be in the policy
    switches: Optional[Mapping[str, str]] = None  # up to 0.25: the id of each known route

    @property
    def label(self) -> str:
        return f"{self.name} (id {self.id})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "node_key": self.key,
            "name": self.name,
            "hostname": self.hostname,
            "user": self.user,
            "tags": list(self.tags),
            "addresses": list(self.addresses),
            "online": self.online,
            "last_seen": written(self.last_seen),
            "expiry": written(self.expiry),
            "available_routes": list(self.available),
            "approved_routes": list(self.approved),
            "served_routes": list(self.served),
        }

    @classmethod
    def of(
        cls, raw: Mapping[str, Any], routes: Optional[Iterable[Mapping[str, Any]]] = None
    ) -> Node:
        """`routes` are the node's, where the server keeps them apart."""
        available = texts(raw.get("availableRoutes"))
        approved = texts(raw.get("approvedRoutes"))
        served = texts(raw.get("subnetRoutes"))
        switches: dict[str, str] = {}
        for route in routes or ():
            prefix = str(route.get("prefix", ""))
            switches[prefix] = str(route.get("id", ""))
            available += (prefix,) if route.get("advertised") else ()
            approved += (prefix,) if route.get("enabled") else ()
            served += (prefix,) if route.get("isPrimary") else ()
        owner = raw.get("user")
        return cls(
            id=str(raw.get("id", "")),
            key=str(raw.get("nodeKey", "")),
            name=str(raw.get("givenName") or raw.get("name", "")),
            hostname=str(raw.get("name", "")),
            user=str(owner.get("name", "")) if isinstance(owner, dict) else "",
            user_id=str(owner.get("id", "")) if isinstance(owner, dict) else "",
            tags=tuple(sorted({*texts(raw.get("tags")), *texts(raw.get("forcedTags"))})),
            addresses=texts(raw.get("ipAddresses")),
            online=bool(raw.get("online")),
            last_seen=read_time(raw.get("lastSeen")),
            expiry=read_time(raw.get("expiry")),
            available=available,
            approved=approved,
            served=served,
            tags_need_owners="tags" in raw,
            switches=None if routes is None else switches,
        )


@dataclass(frozen=True)
class PreAuthKey:
    id: str
    key: str = field(repr=False)  # whole when it is made; from 0.28 on masked in a list
    user: str = ""
    tags: tuple[str, ...] = ()
    reusable: bool = False
    ephemeral: bool = False
    used: bool = False
    expiration: Optional[datetime] = None

    def as_dict(self) -> dict[str, Any]:
        """Without the key itself."""
        return {
            "id": self.id,
            "user": self.user,
            "tags": list(self.tags),
            "reusable": self.reusable,
            "ephemeral": self.ephemeral,
            "used": self.used,
            "expiration": written(self.expiration),
        }

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> PreAuthKey:
        owner = raw.get("user")
        return cls(
            id=str(raw.get("id", "")),
            key=str(raw.get("key", "")),
            user=str(owner.get("name", "")) if isinstance(owner, Mapping) else str(owner or ""),
            tags=texts(raw.get("aclTags")),
            reusable=bool(raw.get("reusable")),
            ephemeral=bool(raw.get("ephemeral")),
            used=bool(raw.get("used")),
            expiration=read_time(raw.get("expiration")),
        )


@dataclass(frozen=True)
class Version:
    """`number` decides what is asked; `text` is what the server says, or the API it has."""

    number: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Policy:
    text: str
    in_file: bool = False


def texts(found: Any) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ()


def read_time(text: Any) -> Optional[datetime]:
    """Go's zero time is none. Fractions go: Python before 3.11 does not read nine digits."""
    if not isinstance(text, str) or text.startswith("0001-"):
        return None
    try:
        return datetime.fromisoformat(text[: len("2026-01-31T12:00:00")]).replace(
            tzinfo=timezone.utc
        )
    except ValueError:
        return None


def written(when: Optional[datetime]) -> str:
    return when.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""
