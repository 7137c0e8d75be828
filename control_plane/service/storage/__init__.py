"""What the control plane keeps, what of it is removed when, and the deletion of jobs."""
