// *ptr += a and *(ptr + 1) += b in float32, each atomic, in no order; ptr is 8-byte aligned.
__device__ __forceinline__ void red_global_add_f32x2(float* ptr, float a, float b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(ptr), "f"(a), "f"(b) : "memory");
#else
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(ptr), "f"(a) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(ptr + 1), "f"(b) : "memory");
#endif
}
