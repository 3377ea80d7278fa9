// The bits of a float32.
__device__ __forceinline__ u32 float_bits(float x) { return __float_as_uint(x); }

// Two float32 to two 16-bit floats, rounded to nearest even, `lo` in the lower half.

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}

__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
