"""The arithmetic of every compressor: ``reference`` (plain torch) defines it, ``cpu`` (numba) and ``gpu`` (Triton) are fast."""
