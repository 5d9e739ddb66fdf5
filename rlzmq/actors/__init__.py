"""The actor system: run any class in its own process and await its methods."""
