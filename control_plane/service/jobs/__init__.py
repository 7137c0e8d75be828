"""Submission, replanning and results of jobs."""
