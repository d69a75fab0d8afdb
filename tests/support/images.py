"""The lab's own container image, for tests of containerd."""

from __future__ import annotations

from lab.images import image as image
