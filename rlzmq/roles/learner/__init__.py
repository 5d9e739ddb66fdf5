"""The learner role: one rank of a learner group."""
