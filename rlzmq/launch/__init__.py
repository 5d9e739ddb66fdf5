"""Several machines: the cluster file, and how its roles are started."""
