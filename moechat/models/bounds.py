"""Bounds that keep a damaged config.json or GGUF file from asking for absurd tables."""

MAX_SIZE = 1 << 20  # of a vector of the model
MAX_TOKENS = 1 << 30
MAX_LAYERS = 1024
# In all layers together; DeepSeek-V3 has 15,616.
MAX_EXPERTS_IN_ALL = 1 << 17
LOWEST_THETA, HIGHEST_THETA = 1.001, 1e12
# Of a matrix: kMaxColumns of cpp/kernels/matmul/matmul.h. The widest public layer has 53,248.
MAX_COLUMNS = 1 << 16
