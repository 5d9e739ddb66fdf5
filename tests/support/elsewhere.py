"""Hide what only Linux has from the script that imports this module, as far as one process can pretend.

Modules and functions that other systems lack are gone, and nothing can be read below /proc and /sys.
"""

import os
import signal
import sys

import gymnasium
import torch
import zmq.asyncio

__all__ = ["gymnasium", "torch", "zmq"]  # they do what they do on each system: imported before

_MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "syslog", "uvloop")
_FUNCTIONS = ("pidfd_open", "memfd_create", "eventfd", "sched_getaffinity", "fork", "register_at_fork")

sys.modules.update(dict.fromkeys(_MODULES))  # type: ignore[arg-type]
for _name in [*_FUNCTIONS, *(name for name in vars(os) if name.startswith("MFD_"))]:
    vars(os).pop(_name, None)
vars(signal).pop("pidfd_send_signal")


def _hide(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(arguments[0])


sys.addaudithook(_hide)
