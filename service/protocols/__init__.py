"""One folder a protocol: parse, render, servicer. `seam` is what each is given and gives back."""
