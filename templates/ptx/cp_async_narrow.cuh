// Asynchronous copies of a word, in the groups of those of cp_async.cuh.

// 4 bytes, through the L1 cache: past it go 16 alone. Without `valid`, 4 zero bytes are written and src is not read.
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
                 : "memory");
}
