"""`python -m statewise`, for `accelerate launch -m statewise` and `torchrun -m statewise`."""

from statewise.cli import main

if __name__ == "__main__":
    main()
