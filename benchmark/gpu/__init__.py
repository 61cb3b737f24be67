"""What only a machine with a GPU can show, in half an hour and without the internet: ``./run gpu``."""
