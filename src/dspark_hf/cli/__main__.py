"""`python -m dspark_hf.cli`."""

from . import main

main()
