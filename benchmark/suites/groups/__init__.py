"""The comparison of `groups`: its loads, its servers, and the same in the simulator."""
