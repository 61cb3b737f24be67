"""The two prefill pools: which server gets a request, and how servers change pools."""
