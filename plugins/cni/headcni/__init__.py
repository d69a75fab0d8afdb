"""HeadCNI's runtime: what runs on a node once Ansible has gone home."""

__version__ = "0.2.0"
