"""What the ranks do in tests of DTensors: attention over shards gives what one process has."""

from __future__ import annotations
