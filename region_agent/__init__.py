"""The region's daemon: link to the control plane, function gateway, worker runtime, local policy."""
