// Global memory, elements of less than a word, the rest of the register zero.

__device__ __forceinline__ u32 ld_global_b8(const void* ptr) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(ptr));
    return v;
}

__device__ __forceinline__ u32 ld_global_b16(const void* ptr) {
    u32 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(ptr));
    return v;
}
