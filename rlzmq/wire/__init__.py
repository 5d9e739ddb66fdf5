"""Messages as frames and back: codec, headers, values. No sockets."""
