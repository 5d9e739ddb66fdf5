"""Conversion of messages to frames and back: codec, headers, values. No sockets."""
