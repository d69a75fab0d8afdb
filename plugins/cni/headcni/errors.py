"""The one exception of the runtime, and every code it may carry."""

from __future__ import annotations

from typing import Any, Dict

# The CNI specification's own codes.
INCOMPATIBLE_VERSION = 1
UNSUPPORTED_FIELD = 2
UNKNOWN_CONTAINER = 3
BAD_ENVIRONMENT = 4
IO_FAILURE = 5
UNDECODABLE = 6
INVALID_CONFIG = 7
TRY_AGAIN = 11
NOT_AVAILABLE = 50
LIMITED = 51

# HeadCNI's codes start at 100. A code keeps its meaning for ever; new ones go at the end.
INTERNAL = 100
KERNEL = 101
NETNS_GONE = 102
ADDRESS_TAKEN = 103
STORE = 104
DELEGATE_FAILED = 105
DELEGATE_TIMEOUT = 106
DELEGATE_MISSING = 107
CHECK_FAILED = 108
KERNEL_LACKS = 109
PORT_TAKEN = 110
NO_POD_CIDR = 111
CONFLIST = 112

MEANINGS: Dict[int, str] = {
    INCOMPATIBLE_VERSION: "the configuration asks for a CNI version that HeadCNI does not speak",
    UNSUPPORTED_FIELD: "a field of the configuration is not supported",
    UNKNOWN_CONTAINER: "the container is unknown or does not exist",
    BAD_ENVIRONMENT: "a CNI_* environment variable is missing or wrong",
    IO_FAILURE: "a file or socket could not be read or written",
    UNDECODABLE: "the configuration is not valid JSON",
    INVALID_CONFIG: "the configuration has mistakes",
    TRY_AGAIN: "not possible just now; the runtime should try again later",
    NOT_AVAILABLE: "the plugin cannot serve ADD requests",
    LIMITED: "the plugin cannot serve ADD requests; existing pods may be cut off",
    INTERNAL: "a bug in HeadCNI",
    KERNEL: "the kernel refused a change",
    NETNS_GONE: "the pod's network namespace is not there",
    ADDRESS_TAKEN: "the requested address belongs to somebody else",
    STORE: "the allocation store cannot be used",
    DELEGATE_FAILED: "a delegated plugin failed",
    DELEGATE_TIMEOUT: "a delegated plugin did not answer in time and was ended",
    DELEGATE_MISSING: "a delegated plugin is not on CNI_PATH",
    CHECK_FAILED: "the pod's network differs from what was set up",
    KERNEL_LACKS: "the kernel lacks a feature that was asked for",
    PORT_TAKEN: "the host port is taken",
    NO_POD_CIDR: "no pod CIDR could be found for this node",
    CONFLIST: "the conflist cannot be written or is not valid",
}


# What an error quotes may come from the author of a pod: its size must not.
LONGEST_MESSAGE = 1024
LONGEST_DETAILS = 4096


def shortened(text: str, longest: int) -> str:
    """The beginning of a text that is too long, and how much of it was left out."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text) - longest} more characters)"


class CniError(Exception):
    """A failure with the spec's code, one sentence, and what to do about it. Both are bounded."""

    def __init__(self, code: int, msg: str, details: str = "") -> None:
        self.code = code
        self.msg = shortened(msg, LONGEST_MESSAGE)
        self.details = shortened(details, LONGEST_DETAILS)
        super().__init__(self.msg)

    def __str__(self) -> str:
        return f"{self.msg}: {self.details}" if self.details else self.msg

    def as_dict(self, cni_version: str) -> Dict[str, Any]:
        answer: Dict[str, Any] = {"cniVersion": cni_version, "code": self.code, "msg": self.msg}
        if self.details:
            answer["details"] = self.details
        return answer
