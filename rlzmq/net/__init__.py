"""The only package that imports zmq: contexts, sockets on the event loop, addresses, keys."""
