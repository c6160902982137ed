"""What compression does to a training run: paired runs on N simulated workers, one command per table.

python -m benchmarks.convergence run dgc --jobs 2      # the runs that benchmarks/results/convergence.jsonl still lacks
python -m benchmarks.convergence summary dgc           # means, spreads, paired differences to dense
python -m benchmarks.convergence plot dgc_curve        # benchmarks/results/convergence_dgc_curve.png
python -m benchmarks.convergence frontier --steps 500  # bits against accuracy of all runs of that length
"""
