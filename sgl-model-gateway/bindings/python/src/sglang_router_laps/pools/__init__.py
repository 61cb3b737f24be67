"""The two prefill pools: choice of a server for each request, and moves of servers between pools."""
