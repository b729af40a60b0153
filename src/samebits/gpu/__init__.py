"""Everything that needs a GPU, in one command that can be repeated: ``python3 -m samebits.gpu`` (``make gpu``), from a checkout.

What has passed is recorded with a fingerprint of the code it ran, in ``tests/golden/gpu.<arch>.json``. A run does only what
is not on record for the code as it is, so a change costs the tests it can touch, and work that does not fit into one run
is finished by the next.
"""
