"""From measurements to device profiles: datasets, fits and their accuracy."""
