"""Many rows of one token as captured steps: rows come and go without the others being staged anew."""
