"""Who may do what, and proof of what was done: rules, signatures, audit logs, attestations."""
