"""Neural networks and what they mean: RLModules, their specs, action distributions, default models."""
