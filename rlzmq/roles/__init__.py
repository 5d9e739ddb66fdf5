"""What runs in each process of a run."""
