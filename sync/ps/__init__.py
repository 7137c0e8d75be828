"""The parameter server of a partition: it holds the model, merges its workers' steps, and exchanges updates with the
other regions."""
