"""Load for servers: prompts, their requests, and a client that sends them."""

# ruff: noqa: F401
from benchmark.load.client import UNANSWERED, Answer, Loop, Route
from benchmark.load.connection import Target, request
from benchmark.load.prompts import Homes, Prompts, SessionPrompts, without_decode_server
