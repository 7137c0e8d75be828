"""What a user's task brings and uses: its modules, packages, secrets, and values that it logs."""
