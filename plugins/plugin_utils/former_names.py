# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Variables that had another name, or were public, in release 0.1.

They work until release 0.3, with a warning. A role reads each of them in one place, in its defaults
or vars. Remove those places together with this table.
"""

from __future__ import annotations

_CONFIG = "headcni_node_extra_config, as {}"
_INTERNAL = "an option of the playbook that needs it: {}"

FORMER: dict[str, str] = {
    "headscale_routes_url": "headcni_headscale_url",
    "headscale_routes_api_key": "headcni_headscale_api_key",
    "headcni_node_headscale_url": "headcni_headscale_url",
    "headcni_node_mode": "headcni_mode",
    "headcni_node_tailscale_socket": "tailscale_socket",
    "headcni_node_tailscaled_environment": "tailscale_environment",
    "headcni_node_magic_dns_domain": "headcni_node_magic_dns.base_domain",
    "headcni_node_magic_dns_nameservers": "headcni_node_magic_dns.nameservers",
    "headcni_node_magic_dns_search_domains": "headcni_node_magic_dns.search_domains",
    "headcni_node_magic_dns_options": "headcni_node_magic_dns.options",
    "headcni_node_interface": _CONFIG.format("tailscale.interfaceName"),
    "headcni_node_ipam_gc_interval": _CONFIG.format("ipam.gcInterval"),
    "headcni_node_headscale_timeout": _CONFIG.format("headscale.timeout"),
    "headcni_node_headscale_retries": _CONFIG.format("headscale.retries"),
    "headcni_node_headscale_api_key_file": _CONFIG.format("headscale.apiKeyFile"),
    "headcni_node_link_cidr": _CONFIG.format("tailscale.linkCIDR"),
    "headcni_node_pod_selector": _CONFIG.format("daemon.podSelector"),
    "headcni_node_reconcile_interval": _CONFIG.format("daemon.reconcileInterval"),
    "headcni_node_stop_timeout": _CONFIG.format("daemon.stopTimeout"),
    "headcni_node_monitoring": _CONFIG.format("monitoring.enabled"),
    "headcni_node_monitoring_path": _CONFIG.format("monitoring.path"),
    "headcni_node_monitoring_pprof": _CONFIG.format("monitoring.pprof"),
    "headcni_node_monitoring_pod_names": _CONFIG.format("monitoring.podNameLabel"),
    "headcni_node_log_format": _CONFIG.format("logging.format"),
    "headcni_node_may_change_pod_cidr": _INTERNAL.format("playbooks/change_pod_cidr.yml"),
    "tailscale_force_reauth": _INTERNAL.format("playbooks/rotate_keys.yml"),
    "headscale_routes_wait_served": _INTERNAL.format("playbooks/site.yml"),
    "headcni_node_ready_without": _INTERNAL.format("playbooks/site.yml"),
    "headcni_node_release_name": "headcni_release, for playbooks/rollback.yml",
    "headcni_node_with_pods": "headcni_with_pods",
    "headcni_node_keep_sysctls": "headcni_keep_sysctls",
}
