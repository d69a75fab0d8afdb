"""Network policies from files, on a node without Kubernetes.

All files are one set: if any of them has a mistake, the last set without a mistake stays in force.
That set is kept on disk, so it also outlives a restart or a reboot with a wrong file. The beginning
of a file may have no mistake and say something else than all of it, so files are read when nobody
has changed any of them for a moment.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from stat import S_IMODE, S_ISDIR, S_ISREG, S_IWGRP, S_IWOTH
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ...errors import CniError, shortened
from ...log import Log
from ...policy.objects import Key, Labels, Namespace, Pod, Policy

# Beside the daemon's configuration, so usually in /etc/headcni.
DIRECTORY, LABELS_FILE = "policies", "pod-labels.yaml"
KEPT = "policies.json"  # in the daemon's data directory

ENDINGS = (".yaml", ".yml", ".json")
MOST_FILES = 1000
LARGEST_FILE = 1 << 20
MOST_TEXT = LARGEST_FILE  # with what aliases stand for
LARGEST_SET = 8 << 20  # bytes of all files together
MOST_OBJECTS = 20_000
MOST_MAPPED = 10_000
LONGEST_PATTERN = 512
PROBLEMS_NAMED = 20
LONGEST_PROBLEM = 1000
SETTLED_SECONDS = 1.0  # without a change before files are read

_PATTERN = r"[a-z0-9.*?-]+/[a-z0-9.*?-]+\Z"
_LABELS_EXPECTED = "pods by namespace/name with their labels, such as shop/web-*: {app: web}"

log = Log("policy-files")

# What tells whether a file has changed.
Stamp = Tuple[int, ...]


class Declared(NamedTuple):
    """What the files say. Pods in `pods` have addresses if they are of other nodes. `labels` are
    for pods by a pattern of namespace/name; later patterns add to earlier ones."""

    policies: Dict[Key, Policy]
    namespaces: Dict[str, Namespace]
    pods: Dict[Key, Pod]
    labels: Tuple[Tuple[str, Labels], ...] = ()


class PolicyFiles:
    """The files as they were read last. Not thread-safe: one thread reads."""

    def __init__(self, kept: str, folder: str, settled: float = SETTLED_SECONDS) -> None:
        """`kept` is the file that holds the last set without a mistake. Files are read when nobody
        has changed them for `settled` seconds."""
        self._kept, self._settled = kept, settled
        self._changing: Tuple[Mapping[str, Stamp], float] = {}, 0.0  # and since when it is so
        self._directory = os.path.join(folder, DIRECTORY)
        self._labels_file = os.path.join(folder, LABELS_FILE)
        self._seen: Optional[Mapping[str, Stamp]] = None
        self.problems: Tuple[str, ...] = ()
        self.declared: Optional[Declared] = None

    def look(self) -> bool:
        """Read the files if they have changed. Returns whether `declared` is new."""
        seen: Optional[Mapping[str, Stamp]] = None
        try:
            seen = self._stamps()
            if seen == self._seen or not self._is_settled(seen):
                return False
            objects, mapped = self._read(sorted(seen))
            declared = declared_by(objects, mapped)
            if self._stamps() != seen:  # somebody has just changed them
                return False
        except _Wrong as wrong:
            self._complain(wrong.problems)
            self._seen = seen if wrong.is_lasting else None
            if self.declared is not None:
                return False
            self.declared = self._last_good()
            return self.declared is not None
        self._seen, self.problems = seen, ()
        self.declared = declared
        self._keep(objects, mapped)
        log.info("read", files=len(seen), policies=len(declared.policies))
        return True

    def _is_settled(self, seen: Mapping[str, Stamp]) -> bool:
        """Whether the files are older than a moment, or have been like this for so long: a clock
        that was set back makes them younger than they are."""
        newest = [time_ns for stamp in seen.values() for time_ns in stamp[-2:]]
        with suppress(FileNotFoundError):  # no policies; its time tells when a file was deleted
            newest.append(os.stat(self._directory).st_mtime_ns)
        age = time.time() - max(newest, default=0) / 1e9
        if age >= self._settled:
            return True
        now = time.monotonic()
        if self._changing[0] != seen:
            self._changing = seen, now
        return now - self._changing[1] >= self._settled

    def _complain(self, problems: List[str]) -> None:
        named = [shortened(one, LONGEST_PROBLEM) for one in problems[:PROBLEMS_NAMED]]
        if len(problems) > len(named):
            named.append(f"and {len(problems) - len(named)} more mistakes")
        for problem in named if tuple(named) != self.problems else ():
            log.error("the policies in files stay as they were", problem=problem)
        self.problems = tuple(named)

    def _stamps(self) -> Dict[str, Stamp]:
        paths = []
        try:
            found = os.stat(self._directory)
            _refuse_others(self._directory, found)
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if entry.name.endswith(ENDINGS) and not entry.name.startswith("."):
                        paths.append(entry.path)
                        if len(paths) > MOST_FILES:
                            raise _Wrong([f"{self._directory} has more than {MOST_FILES} files"])
        except FileNotFoundError:  # no policies
            pass
        except OSError as problem:
            raise _Wrong([f"{self._directory} cannot be read: {problem.strerror}"]) from None
        if os.path.lexists(self._labels_file):
            paths.append(self._labels_file)
        stamps: Dict[str, Stamp] = {}
        for path in paths:
            with suppress(FileNotFoundError):  # it was deleted just now
                try:
                    found = os.stat(path)
                except OSError:  # a link that leads nowhere, which is a mistake
                    found = os.lstat(path)
                times = (found.st_mtime_ns, found.st_ctime_ns)
                stamps[path] = (found.st_dev, found.st_ino, found.st_size, *times)
        return stamps

    def _read(self, paths: List[str]) -> Tuple[List[Tuple[str, Any]], Any]:
        """The objects in all files, each with its place, and the content of the mapping file."""
        objects: List[Tuple[str, Any]] = []
        mapped, problems, size, lasting = None, list[str](), 0, True
        for path in paths:
            try:
                text = _content(path)
                size += len(text)
                if size > LARGEST_SET:
                    raise _Wrong([f"the files of policies have more than {LARGEST_SET >> 20} MiB"])
                documents = _documents(path, text)
            except _Wrong as wrong:
                problems += wrong.problems
                lasting = lasting and wrong.is_lasting
                continue
            if path == self._labels_file:
                mapped = documents[0][1] if documents else None
                if len(documents) > 1:
                    problems.append(f"{path}: {len(documents)} documents, expected one")
            else:
                objects += documents
        if len(objects) > MOST_OBJECTS:
            problems.append(f"{len(objects)} objects in all files, expected at most {MOST_OBJECTS}")
        if problems:
            raise _Wrong(problems, lasting)
        return objects, (self._labels_file, mapped)

    def _keep(self, objects: List[Tuple[str, Any]], mapped: Any) -> None:
        text = json.dumps({"objects": objects, "mapped": mapped}, default=str)
        fresh = f"{self._kept}.new"
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._kept)
        except OSError as problem:
            log.warn("the policies will not outlive a restart with a wrong file", problem=problem)

    def _last_good(self) -> Optional[Declared]:
        try:
            with open(self._kept, encoding="utf-8") as file:
                kept = json.load(file)
            return declared_by(
                [(str(place), one) for place, one in kept["objects"]], kept["mapped"]
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, _Wrong) as problem:
            log.error("the last policies without a mistake cannot be read", problem=problem)
            return None


class _Wrong(Exception):
    """All mistakes. Without `is_lasting`, the next look may find none in the same files."""

    def __init__(self, problems: List[str], is_lasting: bool = True) -> None:
        super().__init__("; ".join(problems))
        self.problems, self.is_lasting = problems, is_lasting


def declared_by(objects: Iterable[Tuple[str, Any]], mapped: Any) -> Declared:
    """The objects, each with the place that an error names."""
    found = Declared({}, {}, {})
    problems: List[str] = []
    defined: Dict[Tuple[str, Any], str] = {}
    for place, one in objects:
        kind = one.get("kind") if isinstance(one, Mapping) else None
        try:
            if kind == "NetworkPolicy":
                policy = Policy.from_object(one, "default")
                key: Any = policy.key
                found.policies[key] = policy
            elif kind == "Namespace":
                namespace = Namespace.from_object(one)
                key = namespace.name
                found.namespaces[key] = namespace
            elif kind == "Pod":
                pod = Pod.from_object(one)
                key = pod.key
                found.pods[key] = pod
            else:
                shown = "missing" if kind is None else repr(str(kind)[:80])
                expected = "NetworkPolicy, Namespace, Pod or List"
                problems.append(f"{place}: kind is {shown}, expected {expected}")
                continue
        except CniError as problem:
            problems.append(f"{place}: {problem}")
            continue
        first = defined.setdefault((str(kind), key), place)
        if first != place:
            name = "/".join(key) if isinstance(key, tuple) else key
            problems.append(f"{place}: the {kind} {name} is also in {first}")
    path, content = mapped if mapped else ("", None)
    labels, wrong = _labels(path, content)
    problems += wrong
    if problems:
        raise _Wrong(problems)
    return found._replace(labels=labels)


def _labels(path: str, content: Any) -> Tuple[Tuple[Tuple[str, Labels], ...], List[str]]:
    """The mapping file."""
    if content is None:
        return (), []
    if not isinstance(content, Mapping) or len(content) > MOST_MAPPED:
        return (), [f"{path}: expected at most {MOST_MAPPED} {_LABELS_EXPECTED}"]
    found, wrong = [], []
    for pattern, labels in content.items():
        text = pattern if isinstance(pattern, str) and len(pattern) <= LONGEST_PATTERN else ""
        if not re.match(_PATTERN, text):
            wrong.append(f"{path}: {str(pattern)[:80]!r}: expected {_LABELS_EXPECTED}")
            continue
        try:
            # The same rules as for labels of a pod, and the same messages.
            meta = {"namespace": "any", "name": "any", "labels": labels}
            found.append((text, Pod.from_object({"metadata": meta}).labels))
        except CniError as problem:
            wrong.append(f"{path}: {text}: {problem.details}")
    return tuple(found), wrong


def _content(path: str) -> bytes:
    """A file that only root may change: it decides who reaches whom."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not S_ISREG(found.st_mode):
                raise _Wrong([f"{path} is no file"])
            _refuse_others(path, found)
            text = file.read(LARGEST_FILE + 1)
    except OSError as problem:
        raise _Wrong([f"{path} cannot be read: {problem.strerror}"], is_lasting=False) from None
    if len(text) > LARGEST_FILE:
        raise _Wrong([f"{path} has more than {LARGEST_FILE >> 20} MiB"])
    return text


def _refuse_others(path: str, found: os.stat_result) -> None:
    """Whoever may change a directory may also take a file out of it."""
    mode = S_IMODE(found.st_mode)
    if found.st_uid in (0, os.geteuid()) and not mode & (S_IWGRP | S_IWOTH):
        return
    wanted = "0755" if S_ISDIR(found.st_mode) else "0644"
    said = f"its owner is {found.st_uid}, its mode {mode:04o}; give it to root with mode {wanted}"
    raise _Wrong([f"{path} may be changed by others: {said}"], is_lasting=False)


def _documents(path: str, text: bytes) -> List[Tuple[str, Any]]:
    """The objects in a file, each with its place. A List stands for its items."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        decoded = text.decode("utf-8")
        if "&" in decoded and _written_out(YAML(typ="safe", pure=True).parse(decoded)) > MOST_TEXT:
            raise _Wrong([f"{path} has more than {LARGEST_FILE >> 20} MiB with its aliases"])
        documents = list(YAML(typ="safe", pure=True).load_all(decoded))
    except MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(wrong.problem or wrong.context).split())
        raise _Wrong([f"{path}{where}: not YAML: {reason}"]) from None
    except (YAMLError, ValueError, RecursionError) as wrong:
        raise _Wrong([f"{path}: not YAML: {' '.join(str(wrong).split())[:120]}"]) from None
    found: List[Tuple[str, Any]] = []
    for number, document in enumerate(documents, 1):
        place = path if len(documents) == 1 else f"{path}, document {number}"
        try:  # it is kept as JSON
            json.dumps(document, default=str)
        except (TypeError, ValueError, RecursionError):
            raise _Wrong([f"{place}: not an object of JSON: expected texts as keys"]) from None
        found += _items(place, document)
        if len(found) > MOST_OBJECTS:
            raise _Wrong([f"{path}: expected at most {MOST_OBJECTS} objects"])
    return found


def _written_out(events: Iterable[Any]) -> float:
    """How long the text would be with the content of each anchor in place of its aliases. They
    can make a short text so long that no memory holds it."""
    anchors: Dict[str, float] = {}
    opened: List[Tuple[Optional[str], float]] = []  # what began before, and how long it all was
    length = 0.0
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind == "AliasEvent":  # of itself, if the anchor's content has not ended
            length += anchors.get(str(anchor), inf)
        elif kind == "ScalarEvent":
            length += 1 + len(event.value)
            if anchor:
                anchors[anchor] = 1 + len(event.value)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            if anchor:
                anchors[anchor] = inf
            opened.append((anchor, length))
            length += 1
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, before = opened.pop()
            if anchor:
                anchors[anchor] = length - before
    return length


def _items(place: str, document: Any) -> Iterator[Tuple[str, Any]]:
    if document is None:  # an empty document
        return
    if not isinstance(document, Mapping) or document.get("kind") != "List":
        yield place, document
        return
    items = document.get("items")
    if not isinstance(items, list):
        raise _Wrong([f"{place}: items of a List: expected a list of objects"])
    for number, item in enumerate(items):
        yield f"{place}, items[{number}]", item
