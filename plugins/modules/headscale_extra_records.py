#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The records of one domain in Headscale's file of extra DNS records."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headscale_extra_records
short_description: Manage the records of a domain in Headscale's file of extra DNS records
version_added: 0.2.0
description:
  - Runs on the host of the Headscale server. Headscale reads the file C(dns.extra_records_path)
    again when it changes, and sends the records to all devices.
  - All records within O(zone) become O(records). Records with other names stay as they are.
  - The file is replaced atomically, and keeps its owner and mode. Runs for different zones take
    turns, and a run fails if another program changes the file at the same moment.
author:
  - The HeadCNI authors (@headcni)
options:
  path:
    description: The file, C(dns.extra_records_path) of Headscale's configuration.
    type: path
    required: true
  zone:
    description: The domain whose records this module manages, such as V(svc.mesh.example.org).
    type: str
    required: true
  records:
    description: The records. An empty list removes all records of the zone.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The name, within O(zone).
        type: str
        required: true
      type:
        description: The type. Headscale knows no others.
        type: str
        choices: [A, AAAA]
        required: true
      value:
        description: The address.
        type: str
        required: true
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return what it would change, without changing it.
  diff_mode:
    support: full
    description: Shows the whole file before and after.
seealso:
  - module: headcni.mesh.headcni_service_names_info
"""

EXAMPLES = r"""
- name: Give a service a name in the tailnet
  headcni.mesh.headscale_extra_records:
    path: /var/lib/headscale/extra-records.json
    zone: svc.mesh.example.org
    records:
      - name: web.shop.svc.mesh.example.org
        type: A
        value: 10.96.7.7
"""

RETURN = r"""
added:
  description: The names that had no record of this type and value before.
  type: list
  elements: str
  returned: success
removed:
  description: The names of records that were removed.
  type: list
  elements: str
  returned: success
others:
  description: How many records of other names the file has.
  type: int
  returned: success
"""

import errno
import fcntl
import json
import os
import tempfile
import time
from ipaddress import ip_address
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import corefile

LARGEST = 4 << 20  # bytes of the file
MOST = 1000  # records of the zone
LOCK_SECONDS = 30.0


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "zone": {"required": True},
            "records": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"required": True},
                    "type": {"choices": ["A", "AAAA"], "required": True},
                    "value": {"required": True},
                },
            },
        },
        supports_check_mode=True,
    )
    # A link stays one. Two runs for different zones take turns.
    path = os.path.realpath(module.params["path"])
    locked = None if module.check_mode else lock(module, os.path.dirname(path))
    try:
        zone = corefile.domain(module.params["zone"])
        wanted = checked(module.params["records"], zone)
        before = read(path)
        found = parsed(before, path)
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))
    ours = [one for one in found if is_within(one["name"], zone)]
    others = [one for one in found if one not in ours]
    after = before if same(ours, wanted) and before else as_text([*others, *wanted])
    changed = after != before
    if changed and not module.check_mode:
        replace(module, path, before, after)
    if locked is not None:
        os.close(locked)
    module.exit_json(
        changed=changed,
        added=names(wanted, ours),
        removed=names(ours, wanted),
        others=len(others),
        diff={"before_header": path, "after_header": path, "before": before, "after": after},
    )


def lock(module: AnsibleModule, folder: str) -> int:
    """The folder, until the handle is closed. Of a folder that is missing, `replace` says so."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as wrong:
        module.fail_json(msg=f"path: {folder} cannot be read: {wrong}")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as wrong:
            if wrong.errno not in (errno.EAGAIN, errno.EACCES):
                return handle  # a file system without locks
        if time.monotonic() > deadline:
            module.fail_json(msg=f"path: another run has had {folder} for {LOCK_SECONDS:.0f} s")
        time.sleep(0.1)


def checked(records: list[dict[str, str]], zone: str) -> list[dict[str, str]]:
    """The wanted records, sorted; a ValueError that names what is wrong."""
    if len(records) > MOST:
        raise ValueError(f"records: {len(records)}, at most {MOST}: all devices get all of them")
    made = []
    for at, given in enumerate(records):
        try:
            name = corefile.domain(given["name"])
        except ValueError as wrong:
            raise ValueError(f"records[{at}].name: {wrong}") from None
        if not is_within(name, zone) or name == zone:
            raise ValueError(f"records[{at}].name: {name}, expected a name within {zone}")
        try:
            fits = ip_address(given["value"]).version == (4 if given["type"] == "A" else 6)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"records[{at}].value: {given['value'][:80]!r}, expected an address for "
                f"{given['type']}"
            )
        made.append({"name": name, "type": given["type"], "value": given["value"]})
    return sorted(made, key=lambda one: (one["name"], one["type"], int(ip_address(one["value"]))))


def read(path: str) -> str:
    """Empty if there is no file yet."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as wrong:
        raise ValueError(f"path: {path} cannot be read: {wrong}") from None
    if len(text) > LARGEST:
        raise ValueError(f"path: {path} is larger than {LARGEST} bytes")
    return text


def parsed(text: str, path: str) -> list[dict[str, Any]]:
    """What the file has. A file that is not understood is not touched."""
    expected = f"path: {path} is not a list of records with a name, as Headscale expects"
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError as wrong:
        raise ValueError(f"{expected}: {wrong}") from None
    if not isinstance(found, list):
        raise ValueError(expected)
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError(f"{expected}: {json.dumps(one)[:80]}")
    return found


def is_within(name: str, zone: str) -> bool:
    return f".{name.rstrip('.').lower()}".endswith(f".{zone}")


def same(ours: list[dict[str, Any]], wanted: list[dict[str, str]]) -> bool:
    def key(one: dict[str, Any]) -> str:
        return json.dumps(one, sort_keys=True)

    return sorted(map(key, ours)) == sorted(map(key, wanted))


def names(those: list[dict[str, Any]], without: list[dict[str, Any]]) -> list[str]:
    return sorted({str(one["name"]) for one in those if one not in without})


def as_text(records: list[dict[str, Any]]) -> str:
    return json.dumps(records, indent=2) + "\n"


def replace(module: AnsibleModule, path: str, before: str, text: str) -> None:
    """In the same folder and by one rename: Headscale never reads half a file."""
    folder = os.path.dirname(path)
    try:
        handle, made = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as wrong:
        module.fail_json(msg=f"path: {path} cannot be written: {wrong}")
    try:
        is_same = read(path) == before
    except ValueError:
        is_same = False
    if not is_same:  # by an editor that does not wait for the lock
        os.unlink(made)
        module.fail_json(msg=f"path: {path} was changed by somebody else just now: run again")
    if not os.path.exists(path):
        os.chmod(made, 0o644)  # Headscale reads it as its own user
    module.atomic_move(made, path, keep_dest_attrs=True)


if __name__ == "__main__":
    main()
