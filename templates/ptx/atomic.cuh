// Atomic operations on global memory that return what was there, in no order with anything else.

__device__ __forceinline__ u32 atom_global_add_u32(u32* ptr, u32 v) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(ptr), "r"(v) : "memory");
    return before;
}
