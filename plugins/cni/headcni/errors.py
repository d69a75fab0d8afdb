"""The one exception of the runtime, and every code it may carry.

``headcni.ctl.explanations`` has the cause and the next step for each code.
"""

from __future__ import annotations

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

# All of the above.
CODES = frozenset(
    value for name, value in globals().items() if name.isupper() and isinstance(value, int)
)

# What an error quotes may come from the author of a pod: its size must not.
LONGEST_MESSAGE = 1024
LONGEST_DETAILS = 4096


def shortened(text: str, longest: int) -> str:
    """The beginning of a text that is too long, and how much of it was left out."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text) - longest} more characters)"


def id_of(code: int) -> str:
    """What ``headcnictl explain`` and docs/errors.md know an error by."""
    return f"HC{code:03d}"


class CniError(Exception):
    """A failure with the spec's code, one sentence, and what to do about it. Both are bounded."""

    def __init__(self, code: int, msg: str, details: str = "") -> None:
        self.code = code
        self.msg = shortened(msg, LONGEST_MESSAGE)
        self.details = shortened(details, LONGEST_DETAILS)
        super().__init__(self.msg)

    def __str__(self) -> str:
        return f"{self.msg}: {self.details}" if self.details else self.msg

    def as_dict(self, cni_version: str) -> dict[str, object]:
        """For the container runtime, which shows it in the pod's events. The details end with what
        explains the error; codes of other plugins are theirs to explain."""
        answer: dict[str, object] = {"cniVersion": cni_version, "code": self.code, "msg": self.msg}
        explained = f"[headcnictl explain {id_of(self.code)}]" if self.code in CODES else ""
        if said := " ".join(filter(None, (self.details, explained))):
            answer["details"] = said
        return answer
