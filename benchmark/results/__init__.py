"""Results: figures, their bars, and the pieces of the report."""

# ruff: noqa: F401
from argparse import Namespace

from benchmark.results.bars import Bar
from benchmark.results.command import Command, Parser, at_least, command_line, count, parser, positive, some_of
from benchmark.results.comparison import FAILED, Column, Comparison, take_turns
from benchmark.results.metrics import KINDS, QUANTILES, Slo, brief, curve, quantile, ttft_paths
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.ratio import Ratio, ratio
