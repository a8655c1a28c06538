"""Independent references: HuggingFace, and a second decoder of quantised weights (design section 9).

The environment is set here, because huggingface_hub, transformers and tqdm read it when they are imported: no network,
no kernels from the hub, no threads in the tokeniser, no bar from the GGUF loader (which obeys no transformers setting).
Idle OpenMP threads sleep: spinning ones cost a factor of ten next to a busy engine on two cores.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["USE_HUB_KERNELS"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
