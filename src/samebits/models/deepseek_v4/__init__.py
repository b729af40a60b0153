"""DeepSeek-V4 in ``transformers``: replace the operators of a decoder layer, and compare the layer with itself."""

from samebits.models.deepseek_v4.compare import LayerComparison, compare_hyper_connection, compare_layer
from samebits.models.deepseek_v4.replace import Replacement, replaced

__all__ = ["LayerComparison", "Replacement", "compare_hyper_connection", "compare_layer", "replaced"]
