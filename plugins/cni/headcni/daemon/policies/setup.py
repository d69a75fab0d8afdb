"""Puts the parts for network policies together."""

from __future__ import annotations

from typing import Callable

from ... import settings as configuration
from ...policy.enforcer import Enforcer
from ...settings import DaemonConfig
from ...store import Store
from ..observe.gauges import measure_policies
from ..observe.metrics import Metrics
from .feed import Feed
from .policies import Policies, Settings, Source


def make(
    config: Callable[[], DaemonConfig],
    store: Callable[[], Store],
    metrics: Metrics,
    has_api_server: bool,
) -> Policies:
    """From the API server if there is one to ask, else from files."""

    def settings() -> Settings:
        network = config().network
        return Settings(network.unknown_policy, network.log_denied)

    enforcer = Enforcer(store, *settings(), config().daemon.reconcile_interval)
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

        node_name = configuration.node_name(config())
        source = FromFiles(store, config().daemon.data_dir, node_name, feed)
    made = Policies(enforcer, feed, source, settings)
    measure_policies(metrics, made)
    return made
