"""The tables of the store, and the steps that bring older stores up to date."""

from __future__ import annotations

from .record import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3


# Addresses are big-endian BLOBs, so those of one family sort like numbers, even with 128 bits.
# Only SQL that SQLite 3.34 knows (RHEL 9, Debian 11): no RETURNING, no STRICT.
_VERSION_1 = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # An address has one holder, on any network: a node has one routing table.
    """CREATE TABLE allocation (
        address BLOB PRIMARY KEY, network TEXT NOT NULL, container_id TEXT NOT NULL,
        ifname TEXT NOT NULL, position INTEGER NOT NULL, prefixlen INTEGER NOT NULL,
        gateway BLOB, pod TEXT NOT NULL, created REAL NOT NULL) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX allocation_owner
        ON allocation (network, container_id, ifname, position)""",
    "CREATE TABLE conflict (address BLOB PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID",
    # The pools were built from `ranges`. If it differs or is '', they are built again.
    "CREATE TABLE network (name TEXT PRIMARY KEY, ranges TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE pool (
        id INTEGER PRIMARY KEY, network TEXT NOT NULL, set_index INTEGER NOT NULL,
        range_index INTEGER NOT NULL, subnet TEXT NOT NULL, first BLOB NOT NULL,
        last BLOB NOT NULL, cursor BLOB, UNIQUE (network, set_index, range_index))""",
    # The addresses of a pool ('usable') and those that no pod has ('free'). The columns of the key
    # come first, because integrity_check of SQLite 3.40 reports other orders as NULL values.
    """CREATE TABLE span (
        pool INTEGER NOT NULL, kind TEXT NOT NULL, last BLOB NOT NULL, first BLOB NOT NULL,
        PRIMARY KEY (pool, kind, last)) WITHOUT ROWID""",
    """CREATE TABLE imported (
        network TEXT NOT NULL, directory TEXT NOT NULL, taken INTEGER NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (network, directory)) WITHOUT ROWID""",
    """CREATE TABLE attachment (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        pod_namespace TEXT NOT NULL, pod_name TEXT NOT NULL, pod_uid TEXT NOT NULL,
        netns TEXT NOT NULL, host_ifname TEXT NOT NULL, config TEXT NOT NULL,
        result TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (network, container_id, ifname))""",
    "CREATE INDEX attachment_container ON attachment (container_id)",
    # The node's nft ruleset is made from these. host_ip is '' for any address of the family.
    """CREATE TABLE firewall (
        network TEXT PRIMARY KEY, pods TEXT NOT NULL, masqueraded TEXT NOT NULL,
        cluster TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE port (
        family INTEGER NOT NULL, protocol TEXT NOT NULL, host_ip TEXT NOT NULL,
        host_port INTEGER NOT NULL, pod_ip TEXT NOT NULL, pod_port INTEGER NOT NULL,
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        pod TEXT NOT NULL,
        PRIMARY KEY (family, protocol, host_ip, host_port)) WITHOUT ROWID""",
    "CREATE INDEX port_owner ON port (network, container_id, ifname)",
    """CREATE TABLE plugin_state (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        place INTEGER NOT NULL, type TEXT NOT NULL, config TEXT NOT NULL, result TEXT NOT NULL,
        boot TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (network, container_id, ifname, place))""",
)
# The link of a deleted pod, which is down and awaits deletion. Then its address becomes free.
_VERSION_2 = (
    """CREATE TABLE tombstone (
        network TEXT NOT NULL, container_id TEXT NOT NULL, ifname TEXT NOT NULL,
        link INTEGER NOT NULL, PRIMARY KEY (network, container_id, ifname)) WITHOUT ROWID""",
)
# The ranges that live pods need in the nft sets. A network has several rows if its configuration
# has changed, or if pods have ranges of their own. `ranges` is JSON. The table `firewall` has the
# same for releases that do not know this table.
_VERSION_3 = (
    """CREATE TABLE firewall_need (
        network TEXT NOT NULL, ranges TEXT NOT NULL, place INTEGER NOT NULL,
        PRIMARY KEY (network, ranges)) WITHOUT ROWID""",
    """INSERT INTO firewall_need SELECT network, '{"cluster": ' || cluster || ', "masqueraded": '
        || masqueraded || ', "pods": ' || pods || '}', 0 FROM firewall""",
)
# Step i changes version i to i + 1. If older releases work with the result (a new table or index),
# the step does not change meta.oldest_reader, so that a rollback of the release keeps the store.
# Any other step (also a new column) sets it to its own version.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2, _VERSION_3)
# Pools and their cursors stay: addresses from before the reboot are not used again at once.
END_OF_BOOT = (
    "DELETE FROM allocation",
    "DELETE FROM conflict",
    "DELETE FROM span",
    "DELETE FROM attachment",
    "DELETE FROM port",
    "DELETE FROM firewall",
    "DELETE FROM firewall_need",
    "DELETE FROM tombstone",
    "DELETE FROM meta WHERE key IN ('lost', 'new')",
    "UPDATE network SET ranges = ''",
)


def migrate(db: sqlite3.Connection, version: int) -> None:
    for step in MIGRATIONS[version:]:
        for statement in step:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
