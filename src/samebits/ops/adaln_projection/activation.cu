// act (padded_rows, pitch) = silu(temb) = temb / (1 + exp(-temb)) in FP32, rounded to `dtype`; zeros beyond the rows and columns
// of temb, so that no reader of act has to look where they end. Stored in that dtype, or (wide) as FP32 after the rounding.
#include "upstream.cuh"

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, add(1.0f, expf(-x))); }

extern "C" __global__ void __launch_bounds__(256)
    activation(void* act, const float* temb, i64 temb_row, i64 rows, i64 size, i64 padded_rows, i64 pitch, i64 dtype, i64 wide) {
  const i64 total = padded_rows * pitch;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (i64)gridDim.x * blockDim.x) {
    const i64 t = i / pitch, d = i % pitch;
    const float value = t < rows && d < size ? silu(temb[t * temb_row + d]) : 0.0f;
    if (dtype == FLOAT32) {
      static_cast<float*>(act)[i] = value;
    } else {
      const unsigned short h = narrow_as(value, (int)dtype);
      if (wide)
        static_cast<float*>(act)[i] = widen_as(h, (int)dtype);
      else
        static_cast<unsigned short*>(act)[i] = h;
    }
  }
}
