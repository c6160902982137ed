"""The arithmetic of every compressor: ``reference`` (plain torch, any device) defines it, ``cpu`` (numba) repeats it fast."""
