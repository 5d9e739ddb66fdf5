"""The broker role: sockets, files and timers around `rlzmq.protocol.broker`."""
