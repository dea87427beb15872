"""This project beside its floors and its peers: ratios, measured in turn in one process."""
