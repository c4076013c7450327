"""Timing on this GPU: what `cufp8 bench` prints and benchmarks/ keeps. `import cufp8` leaves it alone."""
