"""``python -m rlzmq`` is the ``rlzmq`` command."""

import sys

from rlzmq.cli.interrupt import exit_on_signals


def main() -> int:
    """Run the command. It may be ended from its first moments on, also while it still imports what it needs."""
    exit_on_signals()
    from rlzmq.cli.main import main

    code = main()
    exit_on_signals(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
