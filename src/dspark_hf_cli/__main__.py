"""`python -m dspark_hf_cli`."""

from . import main

main()
