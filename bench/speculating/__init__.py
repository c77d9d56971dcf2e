"""What `bench.speculation` measures with."""
