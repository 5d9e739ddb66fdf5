"""The actor system: any class in its own process, its methods awaited from here."""
