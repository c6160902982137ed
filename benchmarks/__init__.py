"""Speed and bytes on the wire; each script says at its top how to run it. See docs/benchmarks.md."""
