"""The host ports of pods: published, withdrawn, and adopted after a loss of the store.

The store decides which pod has a port. The kernel has them as elements of two maps: one has the
pod's address, the other one the pod's port.
"""

from __future__ import annotations

import errno
from collections.abc import Container, Iterable, Sequence
from ipaddress import ip_address

from ..errors import PORT_TAKEN, CniError
from ..model import Address, LeasedAddress, NetworkConfig, Owner, PodRef
from ..record import TYPE_CHECKING
from ..store import Store, owner_key
from . import nft, ruleset
from .netlink import KernelError
from .ruleset import TABLE, Port

if TYPE_CHECKING:
    import sqlite3


def ports_of(network: NetworkConfig, leased: Sequence[LeasedAddress]) -> tuple[Port, ...]:
    """The ports of each mapping, for each family that the pod and the mapping's host IP have."""
    found = []
    for mapping in network.port_mappings:
        for one in leased:
            host = mapping.host_ip
            if host is not None and host.version != one.address.version:
                continue
            anywhere = host is None or host.is_unspecified
            found.append(
                Port(
                    one.address.version,
                    mapping.protocol,
                    "" if anywhere else str(host),
                    mapping.host_port,
                    str(one.address),
                    mapping.container_port,
                )
            )
    return tuple(found)


def publish(store: Store, owner: Owner, pod: PodRef, ports: Sequence[Port]) -> None:
    """Lead all ports to the pod, or none. One transaction changes the store and then the kernel, so
    two pods cannot have the same port, and a failure leaves nothing."""
    if not ports:
        return

    def work(db: sqlite3.Connection) -> None:
        for port in ports:
            _claim(db, owner, pod, port)
        if nft.table_comment(TABLE) != ruleset.comment_of(db):
            ruleset.replace(db)
            return
        try:
            nft.add_elements(TABLE, [one for port in ports for one in port.packed])
        except CniError:
            ruleset.replace(db)  # a call that was killed has left an element

    store.atomically(work)
    forget_connections(ports)


def forget_connections(ports: Iterable[Port]) -> None:
    """Make existing clients use the new rules. TCP clients do so without this, so most pods need
    nothing."""
    lasting = [port for port in ports if port.protocol != "tcp"]
    if not lasting:
        return
    from . import conntrack  # rarely needed

    conntrack.forget_ports(
        [
            conntrack.HostPort(
                ruleset.PROTOCOLS[port.protocol],
                ip_address(port.host_ip) if port.host_ip else None,
                port.host_port,
                ip_address(port.pod_ip),
                port.pod_port,
            )
            for port in lasting
        ]
    )


def _claim(db: sqlite3.Connection, owner: Owner, pod: PodRef, port: Port) -> None:
    key = (port.family, port.protocol, port.host_ip, port.host_port)
    holder = db.execute(
        "SELECT network, container_id, ifname, pod FROM port"
        " WHERE family = ? AND protocol = ? AND host_ip = ? AND host_port = ?",
        key,
    ).fetchone()
    if holder is not None and Owner(*holder[:3]) != owner:
        same = (
            pod.namespace == holder[3].partition("/")[0]
        )  # other namespaces must not learn whose it is
        whose = f"it is {holder[3] or holder[1]}'s; " if same else ""
        raise CniError(
            PORT_TAKEN,
            f"host port {port.host_port}/{port.protocol} leads to another pod already",
            f"{whose}choose another hostPort, or remove that pod; see: headcnictl pods",
        )
    db.execute(
        "INSERT OR REPLACE INTO port VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *key,
            port.pod_ip,
            port.pod_port,
            owner.network,
            owner.container_id,
            owner.ifname,
            str(pod),
        ),
    )


def withdraw(store: Store, owner: Owner) -> tuple[Port, ...]:
    """Withdraw the owner's ports. Nothing is written for pods without ports, which are most."""
    if not store.read(lambda db: ruleset.ports_of_owner(db, owner)):
        return ()

    def work(db: sqlite3.Connection) -> tuple[Port, ...]:
        ports = ruleset.ports_of_owner(db, owner)
        db.execute(
            "DELETE FROM port WHERE network = ? AND container_id = ? AND ifname = ?",
            owner_key(owner),
        )
        if nft.table_comment(TABLE) is not None:
            ruleset.replace(db) if len(ports) > 64 else _remove(db, ports)
        return ports

    withdrawn = store.atomically(work)
    forget_connections(withdrawn)
    return withdrawn


def withdraw_leftovers(store: Store, addresses: Container[Address]) -> None:
    """Remove ports from the kernel that lead to these addresses and are not in the store: an ADD
    that was killed before its commit, or whose commit failed, has left them. Do this before the
    addresses are free. The store's lock is held, as for all changes of the table."""
    store.atomically(lambda _unused: withdraw_from_kernel(addresses))


def withdraw_from_kernel(addresses: Container[Address]) -> None:
    """Remove the ports that lead to these addresses from the kernel, but not from the store. Each
    is removed separately, because another process may have removed some of them."""
    found = [port for port in live_ports() if ip_address(port.pod_ip) in addresses]
    for port in found:
        try:
            nft.delete_elements(TABLE, port.packed)
        except KernelError as problem:
            if problem.errno != errno.ENOENT:
                raise
    forget_connections(found)


def live_ports() -> list[Port]:
    """All ports that the kernel has."""
    elements, found = ruleset.live().elements, []
    for (name, key), pod_ip in elements.items():
        pod_port = elements.get((ruleset.PORT_OF + name, key))
        if pod_port is not None:
            protocol, *at, port = key.split(" . ")
            host_ip = at[0] if at else ""
            found.append(Port(int(name[-1]), protocol, host_ip, int(port), pod_ip, int(pod_port)))
    return found


def adopt(db: sqlite3.Connection, owner: Owner, pod: str, port: Port) -> None:
    """Record a port of the kernel as the owner's, unless it has an owner."""
    db.execute(
        "INSERT OR IGNORE INTO port VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(port.family, port.protocol, port.host_ip, port.host_port),
            *(port.pod_ip, port.pod_port, *owner_key(owner), pod),
        ),
    )


def _remove(db: sqlite3.Connection, ports: Sequence[Port]) -> None:
    try:
        nft.delete_elements(TABLE, [one for port in ports for one in port.packed])
    except CniError:
        ruleset.replace(db)  # another program has removed them: make the table what the store says


def published(store: Store, owner: Owner) -> tuple[Port, ...]:
    return store.read(lambda db: ruleset.ports_of_owner(db, owner))


def owners(store: Store, network: str) -> list[Owner]:
    """The owners of host ports on a network."""
    rows = store.read(
        lambda db: db.execute(
            "SELECT DISTINCT network, container_id, ifname FROM port WHERE network = ?", (network,)
        ).fetchall()
    )
    return [Owner(*row) for row in rows]
