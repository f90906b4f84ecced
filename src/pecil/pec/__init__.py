"""PEC itself, readable next to the paper."""
