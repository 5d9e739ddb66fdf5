"""The runner role: an env runner that samples under leases."""
