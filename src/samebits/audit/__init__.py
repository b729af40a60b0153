"""Static audit of machine code: does a kernel's PTX and SASS keep what its contracts promise? Needs no GPU."""
