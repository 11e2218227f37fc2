"""Settings that must stand before torch is imported: no spinning threads, no network, no fork warnings,
no scores kept from an earlier run of the tests."""

import os
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"  # tests fork, and a pool of OpenMP threads does not survive that
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["STATEWISE_CACHE"] = tempfile.mkdtemp(prefix="statewise-cache-")
