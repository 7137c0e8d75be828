"""The life of jobs: submitted, replanned, ended."""
