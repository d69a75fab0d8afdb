"""How fast it is, beside the Go plugins and other peers, on the same machine in the same run.

`make bench` runs everything; `make bench ONLY="cni ipam"` a part of it. The bars are ratios: what
another machine makes of the same calls is no business of theirs.
"""

import sys

from lab.layout import CHECKOUT

sys.path[:0] = [str(CHECKOUT / part) for part in ("tests/support", "plugins/cni", "collections")]
