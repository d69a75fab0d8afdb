"""A node whose daemon does not enforce network policies, though it may have done so before."""

from __future__ import annotations

from contextlib import closing
from typing import List

from ...datapath.nft import POLICIES, table_comment
from ...policy import admission
from ...policy.bindings import of_attachment
from ...policy.kernel import PolicyTable
from ...store import Store


def withdraw(store: Store) -> List[str]:
    """Delete rules that nobody updates any more. Says what was there."""
    if store.read(admission.is_closed):
        admission.record_closed(store, False)
    if table_comment(POLICIES) is None:
        return []
    with closing(PolicyTable()) as table:
        table.adopt()
        return [f"nft table inet {POLICIES}: no policies are enforced any more"] * table.delete()


def promised(store: Store, since: float) -> List[str]:
    """Pods that were added since then by a netconf that promises them policies."""
    bindings = (of_attachment(one) for one in store.attachments() if one.created > since)
    count = sum(binding is not None and not binding.exempt for binding in bindings)
    if not count:
        return []
    return [
        f"{count} pod interfaces were added with enable_network_policy, but this daemon enforces "
        "no network policies: set network.enableNetworkPolicy, or change the conflist"
    ]
