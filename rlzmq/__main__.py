"""``python -m rlzmq`` is the ``rlzmq`` command."""

import sys

from rlzmq.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
