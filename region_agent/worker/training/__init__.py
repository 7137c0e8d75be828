"""Steps of a worker: the part of the model that it holds, and how steps are made and merged."""
