// What a layer's inner activations are: up, gated.
#pragma once
#include "common.cuh"

// silu(gate) · up.
__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }
