"""Steps: what a worker holds of the model, and how it makes and merges them."""
