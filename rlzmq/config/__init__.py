"""The settings of a run as typed data: declaration, checks, copies, and plain-data forms. It does not import torch."""
