"""Machine code in the folder `kernels` beside this file. Nothing to import."""
