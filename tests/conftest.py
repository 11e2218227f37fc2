"""Settings that must stand before torch is imported: no spinning threads, no network, no fork warnings."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"  # tests fork, and a pool of OpenMP threads does not survive that
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
