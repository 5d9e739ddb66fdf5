"""The settings of a run as typed data: declared, checked, copied, written and read. Needs no torch."""
