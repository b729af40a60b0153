"""Operators of sequences. In ``samebits.ops`` a row depends on no other row; here a row reads the keys of its sequence."""
