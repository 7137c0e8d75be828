"""A function platform for one machine: the OpenFaaS REST API over local processes.

Every replica is a process forked from one warm parent that has numpy and torch loaded. Run it as
``python -m region_agent.gateway.embedded``.
"""
