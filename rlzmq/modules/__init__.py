"""RLModules (neural networks), their specs, action distributions, and default models."""
