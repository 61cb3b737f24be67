"""Measurements that need a machine with a GPU, in half an hour and without the internet: ``./run gpu``."""
