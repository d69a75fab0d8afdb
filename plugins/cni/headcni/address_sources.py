"""Where pods get their addresses: our own pool, another IPAM plugin, or nowhere.

`source_of` chooses the source by the configuration. All sources have the same methods, so that no
caller needs to know which one it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from ipaddress import ip_address, ip_network

from .errors import ADDRESS_TAKEN, NOT_AVAILABLE, CniError
from .ipam.config import ROUTE_KEYS, ensure_may_ask
from .ipam.config import TYPE as OUR_IPAM
from .model import Address, Dns, LeasedAddress, NetworkConfig, Owner, Route
from .record import TYPE_CHECKING, NamedTuple
from .result import leased_by

if TYPE_CHECKING:
    from typing import Any

    from .ipam.allocate import Ipam
    from .plugins.headcni.node import Node
    from .skel import Call
    from .store import Attachment

# Another IPAM plugin may offer addresses that our store knows as leased: so often it is asked.
MOST_OFFERS = 64

ROUTE_NUMBERS = ROUTE_KEYS[2:]


class Given(NamedTuple):
    """What a pod gets from the source."""

    addresses: Sequence[LeasedAddress] = ()
    routes: Sequence[Route] = ()
    dns: Dns = Dns()


class Source:
    """The interface of all sources. This one gives no addresses."""

    # Whether the source is another plugin. It then gets each verb, and a DEL is not deferred.
    runs_plugin = False

    def __init__(self, network: NetworkConfig) -> None:
        self.network = network

    def lease(self, _node: Node, _owner: Owner, _call: Call, _undo: ExitStack) -> Given:
        """Get addresses. If ADD fails later, `undo` returns them, except for the record in the
        store, which the caller removes."""
        return Given()

    def release(self, env: Mapping[str, str]) -> None:
        """Return the address to another plugin. The caller has removed our record."""

    def check(self, env: Mapping[str, str]) -> None:
        pass

    def gc(self, env: Mapping[str, str]) -> None:
        pass

    def status(self, env: Mapping[str, str]) -> None:
        """CniError if the source cannot give addresses."""

    def not_recorded(
        self, _ipam: Ipam, _owner: Owner, _addresses: Collection[Address]
    ) -> list[Address]:
        """Those of the pod's addresses that the store does not record as the pod's."""
        return []

    def record_again(self, _node: Node, _attachment: Attachment) -> None:
        """Record the pod's addresses in the store if they are missing there."""


class OwnPool(Source):
    """The addresses in our store."""

    def lease(self, node: Node, owner: Owner, call: Call, _undo: ExitStack) -> Given:
        from .datapath.link import address_in_use

        ipam = self.network.ipam
        ensure_may_ask(ipam, call.pod.namespace)
        dns = self._dns()
        if ipam.raw.get("importHostLocal"):
            from .ipam.hostlocal import import_on_request  # few networks ask for it

            import_on_request(node.store, owner.network, ipam.raw, ipam.range_sets)
        lease = node.ipam.allocate(owner, ipam, str(call.pod), address_in_use(node.kernel))
        return Given(lease.addresses, ipam.routes, dns)

    def status(self, _env: Mapping[str, str]) -> None:
        try:
            self._dns()
        except CniError as unreadable:
            raise CniError(NOT_AVAILABLE, unreadable.msg, unreadable.details) from unreadable

    def not_recorded(
        self, ipam: Ipam, owner: Owner, addresses: Collection[Address]
    ) -> list[Address]:
        lease = ipam.lease(owner)
        recorded = {leased.address for leased in lease.addresses} if lease else set()
        return [address for address in addresses if address not in recorded]

    def record_again(self, node: Node, attachment: Attachment) -> None:
        node.store.adopt(attachment.owner, str(attachment.pod), attachment.leased)
        addresses = [one.address for one in attachment.leased]
        for address in self.not_recorded(node.ipam, attachment.owner, addresses):
            raise CniError(
                ADDRESS_TAKEN,
                f"{address} was given to another pod meanwhile",
                f"delete the pod {attachment.pod}, so that it gets an address of its own",
            )

    def _dns(self) -> Dns:
        path = self.network.ipam.raw.get("resolvConf")
        if not path:
            return Dns()
        from .ipam.resolvconf import read_resolv_conf

        return read_resolv_conf(path)


class OtherPlugin(Source):
    """Another IPAM plugin, which is run for each verb."""

    runs_plugin = True

    def lease(self, node: Node, owner: Owner, call: Call, undo: ExitStack) -> Given:
        from . import chain

        network, refused = self.network, list[LeasedAddress]()
        for _unused in range(MOST_OFFERS):
            given = chain.ipam_add(network, call.env)
            with ExitStack() as give_back:
                give_back.callback(chain.ipam_del, network, call.env)
                leased = leased_by(given)
                # Our store records them too. If the node changes to our IPAM later, its pods still
                # have addresses of the other one, and the other way round.
                if node.ipam.note(owner, str(call.pod), leased):
                    undo.push(give_back.pop_all())
                    return Given(leased, routes_of(given), _dns_of(given))
            if leased == refused:
                break
            refused = leased
        raise CniError(
            ADDRESS_TAKEN,
            f"{network.ipam.type} gave {', '.join(str(one.address) for one in refused)}, "
            "which another pod of this node has",
            f"that pod has it from before ipam.type was {network.ipam.type}; drain the node, "
            "or exclude the address there",
        )

    def release(self, env: Mapping[str, str]) -> None:
        from . import chain

        chain.ipam_del(self.network, env)

    def check(self, env: Mapping[str, str]) -> None:
        from . import chain

        chain.ipam_check(self.network, env)

    def gc(self, env: Mapping[str, str]) -> None:
        from . import chain

        chain.ipam_gc(self.network, env)

    def status(self, env: Mapping[str, str]) -> None:
        from . import chain

        chain.ipam_status(self.network, env)


def source_of(network: NetworkConfig) -> Source:
    """The source of a network's addresses. Delegates get their addresses themselves."""
    if network.delegates or not network.ipam.type:
        return Source(network)
    return (OwnPool if network.ipam.type == OUR_IPAM else OtherPlugin)(network)


def routes_of(result: Mapping[str, Any]) -> tuple[Route, ...]:
    return tuple(
        Route(
            ip_network(route["dst"], strict=False),
            ip_address(route["gw"]) if "gw" in route else None,
            **{key: route.get(key) for key in ROUTE_NUMBERS},
        )
        for route in result.get("routes", ())
    )


def _dns_of(result: Mapping[str, Any]) -> Dns:
    dns = result.get("dns", {})
    lists = (tuple(dns.get(key, ())) for key in ("nameservers", "search", "options"))
    nameservers, search, options = lists
    return Dns(nameservers, dns.get("domain", ""), search, options)
