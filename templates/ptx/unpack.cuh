// Two 16-bit floats to two float32, exactly; `lo` from the lower half.

__device__ __forceinline__ void unpack_bf16(float& lo, float& hi, u32 v) {
    lo = __uint_as_float(v << 16);
    hi = __uint_as_float(v & 0xffff0000u);
}

__device__ __forceinline__ void unpack_f16(float& lo, float& hi, u32 v) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(lo), "=f"(hi) : "r"(v));
}
