// The bits of a float32.
__device__ __forceinline__ u32 float_bits(float x) { return __float_as_uint(x); }

// Two float32 to two 16-bit floats, rounded to nearest even, `lo` in the lower half. Cards before sm80 convert one at a
// time, and to fp16 only.
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
    u32 v;
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(v)
        : "f"(lo), "f"(hi));
    return v;
}
