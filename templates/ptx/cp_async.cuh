// Asynchronous copies from global to shared memory. A thread's copies since its last commit are one group; a wait
// returns when all but the newest N groups of the calling thread have landed, for that thread alone to see.

// 16 bytes, past the L1 cache. Without `valid`, 16 zero bytes are written and src is not read.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
