"""The settings of a run as typed data: declaration, checks, copies, and plain-data forms. Does not import torch."""
