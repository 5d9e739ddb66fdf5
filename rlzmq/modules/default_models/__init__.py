"""Default models: encoders for all common spaces, and the modules made of them."""
