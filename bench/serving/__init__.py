"""Load over gRPC, from processes of its own: what `bench.serve` measures with."""
