// Additions to global memory in float32, atomic a word, in no order.

__device__ __forceinline__ void red_global_add_f32(float* ptr, float v) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(ptr), "f"(v) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Four consecutive words; ptr is 16-byte aligned.
__device__ __forceinline__ void red_global_add_f32x4(float* ptr, const float (&v)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(ptr), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
#endif
