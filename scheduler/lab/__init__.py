"""What exists for comparison, and runs no job: published schedulers, and a planner for the jobs of one region.

Benchmarks and `geofed simulate` use it; `geofed[lab]` installs the solver that its bounds need.
"""
