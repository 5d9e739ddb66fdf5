"""Run a cluster file on its machines: python scripts/launch_cluster.py cluster.toml (see docs/cluster.md)."""

from __future__ import annotations

import sys

from rlzmq.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
