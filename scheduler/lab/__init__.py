"""What exists for comparison, and runs no job: published schedulers.

Benchmarks and `geofed simulate` use it; `geofed[lab]` installs the solver that its bounds need.
"""
