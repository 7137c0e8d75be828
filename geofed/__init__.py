"""Train one model on data in several regions, without moving the data."""
