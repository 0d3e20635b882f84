// The kernels' own text, compiled as C++.
#include "gpt/cuda/compute.cu"
