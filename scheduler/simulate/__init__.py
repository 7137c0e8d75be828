"""Traces of jobs with deadlines under several schedulers: events, one clock, the same core as live."""
