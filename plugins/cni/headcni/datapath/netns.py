"""Being in another network namespace for a moment."""

from __future__ import annotations

import _ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import BAD_ENVIRONMENT, NETNS_GONE, CniError
from ..record import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Callable, Optional, TypeVar

    T = TypeVar("T")


CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
_FORWARDING6 = "net/ipv6/conf/all/forwarding"
_LEARNT = 0x00050000  # RTF_DEFAULT and RTF_ADDRCONF


class _Function(_ctypes.CFuncPtr):
    """A function of the C library that returns an int. `ctypes` itself takes half a millisecond to
    import."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO


_libc = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # this process, as ctypes has it
_setns, _unshare, _prctl = (
    _Function(_ctypes.dlsym(_libc, name)) for name in ("setns", "unshare", "prctl")
)


def _enter(fd: int) -> None:
    if _setns(fd, CLONE_NEWNET) != 0:
        number = _ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_parent_death_signal(number: int) -> None:
    """The calling process gets the signal when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def apart(work: Callable[[], T]) -> T:
    """Do the work in a network namespace of its own, which ends with it. It has a thread of its
    own, since a thread that has left the node's namespace is of no further use."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and rarely needed

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_unshared, work).result()


def _unshared(work: Callable[[], T]) -> T:
    if _unshare(CLONE_NEWNET) != 0:
        number = _ctypes.get_errno()
        raise OSError(number, os.strerror(number), "a new network namespace")
    return work()


@contextmanager
def opened(path: str, given: Optional[int] = None) -> Iterator[int]:
    """A descriptor of the pod's namespace. A path that is there but is no namespace is no pod.

    `given` is one that the caller has of it already: it is used in place of the path.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if given is None else os.dup(given)
    except OSError as problem:
        raise CniError(
            NETNS_GONE,
            f"the pod's network namespace {path} cannot be opened",
            problem.strerror or "",
        ) from None
    try:
        if os.stat(fd).st_dev != os.stat("/proc/self/ns/net").st_dev:
            raise CniError(
                NETNS_GONE, f"{path} is not a network namespace", "the pod was probably removed"
            )
        yield fd
    finally:
        os.close(fd)


def is_our_own(fd: int) -> bool:
    """True for the node's own namespace: a host-network pod, which is none of our business."""
    return os.path.samestat(os.stat(fd), os.stat("/proc/thread-self/ns/net"))


@contextmanager
def of_pod(path: str, given: Optional[int] = None) -> Iterator[int]:
    """The same for an ADD, which must not change the node's own namespace."""
    with opened(path, given) as fd:
        if is_our_own(fd):
            raise CniError(
                BAD_ENVIRONMENT,
                f"CNI_NETNS={path} is the node's own network namespace",
                "a pod on the host's network needs no CNI",
            )
        yield fd


@contextmanager
def entered(fd: int) -> Iterator[None]:
    """The calling thread, and it alone, is in that namespace inside the block."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(fd)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def read_sysctl(path: str) -> Optional[str]:
    """None where the kernel does not have it."""
    return read_file(f"/proc/sys/{path}")


def read_file(path: str) -> Optional[str]:
    """A short one of /proc or /sys; None if the kernel does not have it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 4096).decode("ascii").strip()  # a third of what a file object takes
    except OSError:
        return None
    finally:
        os.close(fd)


def write_sysctl(path: str, value: str) -> None:
    """Write it unless it is so already; a kernel without it is left in peace."""
    try:
        fd = os.open(f"/proc/sys/{path}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError:  # /proc/sys may be read-only
        if read_sysctl(path) in (None, value):
            return
        raise
    try:
        if os.read(fd, 4096).strip() != value.encode("ascii"):
            os.pwrite(fd, value.encode("ascii"), 0)
    finally:
        os.close(fd)


def forward_ipv6() -> None:
    """Have the node forward. One that does forgets the routers that it has learnt of, and its
    default route with them, unless their links' accept_ra is 2."""
    if read_sysctl(_FORWARDING6) == "0":
        for link in _links_with_routers():
            if read_sysctl(f"net/ipv6/conf/{link}/accept_ra") == "1":
                write_sysctl(f"net/ipv6/conf/{link}/accept_ra", "2")
    write_sysctl(_FORWARDING6, "1")


def has_ipv6() -> bool:
    return read_sysctl(_FORWARDING6) is not None


def _links_with_routers() -> set[str]:
    """Those that a default route leads to which a router has announced."""
    with suppress(OSError), open("/proc/thread-self/net/ipv6_route", encoding="ascii") as file:
        routes = [line.split() for line in file]
        return {route[9] for route in routes if int(route[8], 16) & _LEARNT == _LEARNT}
    return set()
