"""Measurements of tasks: by probes, profiles and earlier runs."""
