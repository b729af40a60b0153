"""DeepSeek-V4 in ``transformers``: put our operators at its call sites, and compare the model with itself."""

from samebits.models.deepseek_v4.compare import LayerComparison, compare_layer
from samebits.models.deepseek_v4.patching import patch, patched, to_bfloat16, unpatch
from samebits.models.sites import Patched

__all__ = ["LayerComparison", "Patched", "compare_layer", "patch", "patched", "to_bfloat16", "unpatch"]
