"""One folder per protocol: parse, render, servicer. `seam` declares what each receives and provides."""
