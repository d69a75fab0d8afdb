"""Puts the parts for network policies together."""

from __future__ import annotations

from typing import Callable

from ... import settings as configuration
from ...policy.bindings import of_attachment
from ...policy.enforcer import Enforcer
from ...settings import DaemonConfig
from ...store import Store
from ..observe.gauges import measure_policies
from ..observe.metrics import Metrics
from .feed import Feed
from .policies import Policies, Settings, Source


def without_policies(store: Store) -> int:
    """The pod interfaces of networks that do not have policies, such as those of before."""
    bindings = map(of_attachment, store.attachments())
    return sum(binding is not None and binding.exempt for binding in bindings)


def make(
    config: Callable[[], DaemonConfig],
    store: Callable[[], Store],
    metrics: Metrics,
    has_api_server: bool,
    folder: str,
) -> Policies:
    """From the API server if there is one to ask, else from files in this folder."""

    def settings() -> Settings:
        network = config().network
        return Settings(network.unknown_policy, network.log_denied)

    node_name = configuration.node_name(config())
    interval = config().daemon.reconcile_interval
    enforcer = Enforcer(store, *settings(), interval, node_name)
    feed = Feed(enforcer, metrics.policies_applied)
    source: Source
    if has_api_server:
        from ..kubernetes import access
        from ..kubernetes.client import KubeClient
        from .from_kubernetes import FromKubernetes

        place = access.Source(config().daemon.kubeconfig)
        source = FromKubernetes(lambda: KubeClient(place, timed=metrics.kubernetes), feed)
    else:
        from .from_files import FromFiles

        source = FromFiles(store, config().daemon.data_dir, node_name, feed, folder)
    made = Policies(enforcer, feed, source, settings, lambda: without_policies(store()), node_name)
    measure_policies(metrics, made)
    return made
