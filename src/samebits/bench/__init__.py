"""Timing beside peers, with the bits of what was timed verified in the same run."""
