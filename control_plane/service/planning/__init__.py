"""Calls of the scheduler: admission, allocation of workers, routing of updates."""
