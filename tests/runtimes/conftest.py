"""The lab's nodes with containerd, as tests/lab has them."""

from tests.lab.conftest import containerd as containerd
from tests.lab.conftest import cri as cri
from tests.lab.conftest import joined as joined
from tests.lab.conftest import runtime as runtime
