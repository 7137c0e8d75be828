"""What exists for comparison, and runs no job: published schedulers, and planners for one region or for many jobs.

Benchmarks and `geofed simulate` use it; `geofed[lab]` installs the solver that its bounds need.
"""
