"""The router's HTTP application: routes for clients and for operators."""
