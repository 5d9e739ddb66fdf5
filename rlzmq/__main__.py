"""``python -m rlzmq`` is the ``rlzmq`` command."""

import atexit
import sys

from rlzmq.cli.interrupt import exit_on_signals, ignore_signals
from rlzmq.core.process import explain_ends


def main() -> int:
    """Run the command. It may be ended from its first moments on, also while it still imports what it needs."""
    exit_on_signals()
    explain_ends()
    atexit.register(ignore_signals)  # first, and so called last
    from rlzmq.cli.main import main

    code = main()
    exit_on_signals(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
