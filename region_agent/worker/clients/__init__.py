"""Local training of the clients that a region holds: federated averaging inside of the region."""
